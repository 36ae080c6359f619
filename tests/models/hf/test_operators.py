# SPDX-License-Identifier: Apache-2.0
"""What TVM's importer makes of operators of PyTorch, with ours in the place of some of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc.comm.collective_relax_op import same_extents

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from tvm.relax.frontend.torch import from_exported_program

from tvm_ipc.models.hf.torch_operators import OPERATORS


def run(program: Any, given: tuple[Any, ...]) -> list[Any]:
    """Return what TVM computes of an exported program."""
    mod = from_exported_program(program, keep_params_as_input=True, custom_convert_map=OPERATORS)
    mod, weights = relax.frontend.detach_params(mod)
    executable = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1))
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return list(main(*map(tvm.runtime.from_dlpack, given), *weights["main"]))


class Convolutions(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Convolutions of one, two and three axes; with groups, transposed, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.line = nn.ModuleList(
            [nn.Conv1d(24, 5, 3, padding=1), nn.ConvTranspose1d(24, 5, 3, stride=2)]
        )
        self.plane = nn.ModuleList(
            [
                nn.Conv2d(24, 8, 2, stride=2, groups=4),
                nn.Conv2d(24, 8, 3, dilation=2, bias=False),
                nn.ConvTranspose2d(24, 7, 2, stride=2, output_padding=1),
            ]
        )
        self.space = nn.ModuleList([nn.Conv3d(24, 4, 2)])

    def forward(self, line: Any, plane: Any, space: Any) -> Any:
        given = ((self.line, line), (self.plane, plane), (self.space, space))
        return tuple(layer(x) for layers, x in given for layer in layers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_convolutions(dtype: str) -> None:
    """Summed in float32 and rounded once, or in the type of the operands if that is wider."""
    torch.manual_seed(0)
    model = Convolutions().eval().to(getattr(torch, dtype))
    given = tuple(
        torch.randn(shape).to(getattr(torch, dtype))
        for shape in ((2, 24, 9), (2, 24, 7, 8), (1, 24, 4, 3, 5))
    )
    program = torch.export.export(model, given)
    found = run(program, given)
    with torch.no_grad():
        exact = model.double()(*(one.double() for one in given))
    for one, wanted in zip(found, exact, strict=True):
        assert str(one.dtype) == dtype
        once = wanted.to(getattr(torch, dtype)).double().numpy()
        ulp = {"bfloat16": 2**-7, "float16": 2**-10, "float64": 1e-12}[dtype]
        # One unit in the last place, where the sum of float32 lies between two numbers.
        found_once = one.numpy().astype("float64")
        np.testing.assert_allclose(found_once, once, rtol=ulp, atol=min(ulp, 1e-6))


class Sums(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Of many numbers, which numbers of 16 bits cannot count one by one; and powers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(4)
        torch.nn.init.uniform_(self.norm.running_mean, -1, 1)
        torch.nn.init.uniform_(self.norm.running_var, 0.1, 1)

    def forward(self, x: Any, count: Any) -> Any:
        pooled = torch.nn.functional.adaptive_avg_pool2d(x, 1)
        sums = x.sum(-1), x.mean((2, 3)), pooled, torch.cumsum(x, -1), x.var(-1)
        others = self.norm(x), x**2.5, torch.nn.functional.layer_norm(x, (1000,))
        return *sums, *others, torch.cumsum(x, -1, dtype=torch.float32), count**3


def test_bfloat16_beside_products() -> None:
    """No further from the exact ones than what PyTorch computes, which sums in float32, too."""
    torch.manual_seed(0)
    model = Sums().eval().bfloat16()
    x, count = torch.rand(2, 4, 3, 1000).bfloat16() + 0.5, torch.arange(7)
    found = run(torch.export.export(model, (x, count)), (x, count))
    with torch.no_grad():
        theirs, exact = model(x, count), model.double()(x.double(), count)
    for one, their, right in zip(found, theirs, exact, strict=True):
        assert str(one.dtype) == str(their.dtype).removeprefix("torch.")
        right = right.double().numpy()
        ours = np.abs(one.numpy().astype("float64") - right).max()
        assert ours <= 1.1 * np.abs(their.double().numpy() - right).max()


class Slices(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Parts of a table of 12 columns, as many as there are in a row, or fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(36.0).reshape(3, 12))

    def forward(self, x: Any) -> Any:
        n = x.shape[1]
        within = self.table[:, :n], self.table[:, 2 : n + 2], x[:, -1:], x[:, 1:n], x[:, : n - 1]
        return tuple(one * 2 for one in within)


def test_slices() -> None:
    """Extents are known where PyTorch knows them, so that other operators take them."""
    longest = torch.export.Dim("longest", min=3, max=10)
    program = torch.export.export(Slices(), (torch.zeros(3, 5),), dynamic_shapes=({1: longest},))
    mod = from_exported_program(program, custom_convert_map=OPERATORS)
    n = mod["main"].params[0].ty.shape[1]
    extents = [one.shape[1] for one in mod["main"].ret_ty.fields]
    for found, wanted in zip(extents, (n, n, 1, n - 1, n - 1), strict=True):
        assert same_extents([found], [wanted])
    executable = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1))
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    for length in (3, 5, 10):
        x = torch.randn(3, length)
        found = main(tvm.runtime.from_dlpack(x))
        for one, wanted in zip(found, Slices()(x), strict=True):
            np.testing.assert_array_equal(one.numpy(), wanted.detach().numpy())


class Rows(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Rows of a tensor that are put into another, along its last axis but one."""

    def forward(self, x: Any, rows: Any, places: Any) -> Any:
        copied = x.clone()
        copied.index_copy_(2, places.abs(), rows)
        put = x.clone()
        put[:, :, places] = rows[:1]
        return copied, put


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_put(dtype: str) -> None:
    x, rows = (torch.randn(2, 3, n, 4).to(getattr(torch, dtype)) for n in (7, 2))
    given = (x, rows, torch.tensor([5, -3]))
    found = run(torch.export.export(Rows(), given), given)
    for one, wanted in zip(found, Rows()(*given), strict=True):
        np.testing.assert_array_equal(one.numpy().astype("float32"), wanted.float().numpy())

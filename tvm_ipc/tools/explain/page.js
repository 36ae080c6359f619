// Without this script the browser shows tooltips. With it, a panel below the plan shows them, which
// works without a pointer, and the plan can be stretched.
for (const plan of document.querySelectorAll(".plan")) {
  const panel = document.createElement("p");
  panel.className = "detail";
  panel.setAttribute("aria-live", "polite");
  panel.textContent = "Point at a tensor, a transfer or a kernel to see its details.";
  plan.querySelector(".grid").after(panel);
  const words = new Map();
  for (const shape of plan.querySelectorAll(".t, .act")) {
    const title = shape.querySelector("title");
    if (!title) continue; // in the legend
    words.set(shape, title.textContent);
    title.remove();
  }
  let shown = null;
  const show = (event) => {
    const shape = event.target.closest ? event.target.closest(".t, .act") : null;
    if (!words.has(shape) || shape === shown) return;
    if (shown) shown.classList.remove("on");
    shown = shape;
    shape.classList.add("on");
    panel.textContent = words.get(shape);
  };
  plan.addEventListener("pointerover", show);
  plan.addEventListener("click", show);

  const scroll = plan.querySelector(".scroll");
  const buttons = document.createElement("div");
  buttons.className = "zoom";
  const inner = plan.querySelector(".inner");
  // Make lines transparent when events are closer than the width of a line.
  const updateScale = () => {
    const zoom = inner.clientWidth / scroll.clientWidth;
    plan.classList.toggle("dense", inner.clientWidth / plan.dataset.events < 2.5);
    for (const hatch of plan.querySelectorAll(".inner pattern")) {
      hatch.setAttribute("patternTransform", `scale(${1000 / inner.clientWidth} 1)`);
    }
    return zoom;
  };
  const stretch = (to) => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / inner.clientWidth;
    inner.style.width = `${100 * Math.min(64, Math.max(1, to))}%`;
    updateScale();
    scroll.scrollLeft = middle * inner.clientWidth - scroll.clientWidth / 2;
  };
  const actions = [
    ["\u2212", "narrower", () => stretch(updateScale() / 2)],
    ["fit", "as wide as the page", () => stretch(1)],
    ["+", "wider", () => stretch(updateScale() * 2)],
  ];
  for (const [text, label, action] of actions) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-label", label);
    button.addEventListener("click", action);
    buttons.append(button);
  }
  plan.prepend(buttons);
  updateScale();
  addEventListener("resize", updateScale);
}

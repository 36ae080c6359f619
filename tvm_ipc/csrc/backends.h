/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backends.h
 * \brief The backends that there are.
 */
#ifndef TVM_IPC_BACKENDS_H_
#define TVM_IPC_BACKENDS_H_

#include <string>
#include <vector>

#include "core/backend.h"

namespace tvm_ipc {

/*! \brief All of them; the first is the one that "auto" means. */
const std::vector<const Backend*>& Backends();
/*! \brief One by its name, or "auto"; an error if there is none. */
const Backend& FindBackend(const std::string& name);

/*! \brief The one for the devices of this machine; it starts what they need to be found. */
const Backend& BackendOfMachine();

}  // namespace tvm_ipc
#endif  // TVM_IPC_BACKENDS_H_

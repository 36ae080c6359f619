/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backends.h
 * \brief The table of backends.
 */
#ifndef TVM_IPC_BACKENDS_H_
#define TVM_IPC_BACKENDS_H_

#include <string>
#include <vector>

#include "core/communication_backend.h"

namespace tvm_ipc {

/*! \brief Return all backends; "auto" means the first one. */
const std::vector<const Backend*>& Backends();
/*! \brief Return the backend with a name, or "auto"; throw if there is none. */
const Backend& FindBackend(const std::string& name);

/*! \brief Return the backend for the devices of this machine. Initializes what is needed to find
 *         them. */
const Backend& BackendOfMachine();

}  // namespace tvm_ipc
#endif  // TVM_IPC_BACKENDS_H_

/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file checks.h
 * \brief What tensors of a collective have to be like, whoever moves them. Each throws an error
 * that says what is wrong.
 */
#ifndef TVM_IPC_SHM_CHECKS_H_
#define TVM_IPC_SHM_CHECKS_H_

#include "core/backend.h"

namespace tvm_ipc {

/*! \brief A member's part in a collective: of how many, and which. */
struct Part {
  int size;
  int index;
  size_t members() const { return static_cast<size_t>(size); }
};

/*! \brief Whether a member has the place. */
void CheckRoot(const char* operation, int root, int size);
void CheckAllReduce(const Buffer& send, const Buffer& recv);
/*! \param recv The root's; others have none. */
void CheckReduce(const Buffer& send, bool receives, const Buffer* recv);
void CheckReduceScatter(const Buffer& send, const Buffer& recv, Part part);
void CheckAllGather(const Buffer& send, const Buffer& recv, Part part);
void CheckBroadcast(const Buffer* send, bool sends, const Buffer& recv);
void CheckScatter(const Buffer* send, bool sends, const Buffer& recv, Part part);
void CheckGather(const Buffer& send, bool receives, const Buffer* recv, Part part);
void CheckPermute(const Buffer& send, const Sources& sources, const Buffer& recv, Part part);
void CheckAllToAll(const Buffer& send, const Parts& parts, const Buffer& recv, Part part);

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_CHECKS_H_

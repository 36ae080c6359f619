// SPDX-License-Identifier: Apache-2.0
/*!
 * \file peer_mpi.c
 * \brief A loop over MPI_Allreduce, the most favourable way to call it.
 *
 * Usage: peer_mpi SOCKET {single|multiple}, the thread support to ask MPI for. MPICH chooses
 * another transport by it: single is faster for small messages, multiple for large ones.
 */
#include <mpi.h>

#include "peer.h"

struct Case {
  MPI_Datatype type;
  size_t width, count;
  void *send, *recv;
};

static int prepare(struct Case* c, const char* dtype, size_t count, int rank, int ranks) {
  free(c->send);
  free(c->recv);
  c->send = c->recv = NULL;
  c->type = MPI_DATATYPE_NULL;
  int half = strcmp(dtype, "bfloat16") == 0;
  if (strcmp(dtype, "float32") == 0) c->type = MPI_FLOAT;
#ifdef MPIX_BFLOAT16
  if (half) c->type = MPIX_BFLOAT16;  // MPICH's extension; the standard has no such type
#endif
  if (c->type == MPI_DATATYPE_NULL) return -1;
  c->width = half ? 2 : 4;
  c->count = count;
  c->send = buffer(count * c->width);
  c->recv = buffer(count * c->width);
  memset(c->recv, 0xff, count * c->width);
  for (size_t i = 0; i < count; ++i) {
    if (half) {
      ((uint16_t*)c->send)[i] = to_bf16(term(i, rank));
    } else {
      ((float*)c->send)[i] = term(i, rank);
    }
  }
  if (MPI_Allreduce(c->send, c->recv, (int)count, c->type, MPI_SUM, MPI_COMM_WORLD)) return -1;
  for (size_t i = 0; i < count; ++i) {
    float got = half ? from_bf16(((uint16_t*)c->recv)[i]) : ((float*)c->recv)[i];
    if (got != expected(i, ranks)) return 0;
  }
  return 1;
}

static double run(const struct Case* c, long iterations, int rewriting) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = now();
  for (long i = 0; i < iterations; ++i) {
    if (rewriting) rewrite(c->send, c->count * c->width, (float)(i & 1));
    MPI_Allreduce(c->send, c->recv, (int)c->count, c->type, MPI_SUM, MPI_COMM_WORLD);
  }
  return now() - start;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int wanted = argv[2][0] == 'm' ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, provided;
  MPI_Init_thread(&argc, &argv, wanted, &provided);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int link = meet(argv[1], rank);
  FILE* commands = fdopen(link, "r");
  struct Case c = {MPI_DATATYPE_NULL, 0, 0, NULL, NULL};
  char line[128], dtype[32];
  unsigned long count;
  long iterations;
  int rewriting;
  while (fgets(line, sizeof(line), commands)) {
    if (sscanf(line, "prepare %31s %lu", dtype, &count) == 2) {
      int result = prepare(&c, dtype, count, rank, ranks);
      dprintf(link, "%s\n", result < 0 ? "unsupported" : result ? "ok" : "bad");
    } else if (sscanf(line, "run %ld %d", &iterations, &rewriting) == 2) {
      dprintf(link, "%.9f\n", run(&c, iterations, rewriting));
    }
  }
  MPI_Finalize();
  return 0;
}

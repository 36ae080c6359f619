// SPDX-License-Identifier: Apache-2.0
/*!
 * \file peer_mpi.c
 * \brief A loop over MPI_Allreduce or another reduction, the most favourable way to call it.
 *
 * Usage: peer_mpi SOCKET {single|multiple} [allreduce|reduce_scatter|reduce]. The second is the
 * thread support to ask MPI for. MPICH chooses another transport by it: single is faster for small
 * messages, multiple for large ones. What is reduced to one rank is so to rank 0.
 */
#include <mpi.h>

#include "peer.h"

enum Collective { kAllReduce, kReduceScatter, kReduce };

struct Case {
  enum Collective collective;
  int rank, ranks;
  int* parts;  // how much of a reduce-scatter each rank gets
  MPI_Datatype type;
  size_t width, count;
  void *send, *recv;
};

static int reduce(const struct Case* c) {
  switch (c->collective) {
    case kReduceScatter:
      return MPI_Reduce_scatter(c->send, c->recv, c->parts, c->type, MPI_SUM, MPI_COMM_WORLD);
    case kReduce:
      return MPI_Reduce(c->send, c->recv, (int)c->count, c->type, MPI_SUM, 0, MPI_COMM_WORLD);
    default:
      return MPI_Allreduce(c->send, c->recv, (int)c->count, c->type, MPI_SUM, MPI_COMM_WORLD);
  }
}

static int prepare(struct Case* c, const char* dtype, size_t count) {
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
      ((uint16_t*)c->send)[i] = to_bf16(term(i, c->rank));
    } else {
      ((float*)c->send)[i] = term(i, c->rank);
    }
  }
  size_t first = 0, end = c->collective == kReduce && c->rank != 0 ? 0 : count;
  if (c->collective == kReduceScatter) {
    const size_t part = count / (size_t)c->ranks;
    for (int i = 0; i < c->ranks; ++i) c->parts[i] = (int)part;
    first = (size_t)c->rank * part;
    end = first + part;
  }
  if (reduce(c)) return -1;
  for (size_t i = first; i < end; ++i) {
    float got = half ? from_bf16(((uint16_t*)c->recv)[i - first]) : ((float*)c->recv)[i - first];
    if (got != expected(i, c->ranks)) return 0;
  }
  return 1;
}

static double run(const struct Case* c, long iterations, int rewriting) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = now();
  for (long i = 0; i < iterations; ++i) {
    if (rewriting) rewrite(c->send, c->count * c->width, (float)(i & 1));
    reduce(c);
  }
  return now() - start;
}

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  int wanted = argv[2][0] == 'm' ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, provided;
  MPI_Init_thread(&argc, &argv, wanted, &provided);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int link = meet(argv[1], rank);
  FILE* commands = fdopen(link, "r");
  struct Case c = {.type = MPI_DATATYPE_NULL, .rank = rank, .ranks = ranks};
  if (argc == 4 && strcmp(argv[3], "reduce_scatter") == 0) c.collective = kReduceScatter;
  if (argc == 4 && strcmp(argv[3], "reduce") == 0) c.collective = kReduce;
  c.parts = calloc((size_t)ranks, sizeof(int));
  char line[128], dtype[32];
  unsigned long count;
  long iterations;
  int rewriting;
  while (fgets(line, sizeof(line), commands)) {
    if (sscanf(line, "prepare %31s %lu", dtype, &count) == 2) {
      int result = prepare(&c, dtype, count);
      dprintf(link, "%s\n", result < 0 ? "unsupported" : result ? "ok" : "bad");
    } else if (sscanf(line, "run %ld %d", &iterations, &rewriting) == 2) {
      dprintf(link, "%.9f\n", run(&c, iterations, rewriting));
    }
  }
  MPI_Finalize();
  return 0;
}

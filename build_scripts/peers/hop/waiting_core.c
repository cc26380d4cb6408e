/* A core that takes as long as one on a GPU and leaves the processor alone: a Triton backend.

   A batch takes BATCH_NS + ROW_NS a row + TOKEN_NS a token, then every output is zeros. Compiled
   for one model: OUTPUT is its output, WIDTH its last dimension, PER_TOKEN whether each token has a
   row of it. What is declared here is all of Triton's backend interface that it needs. */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

typedef struct Error Error;
typedef struct Input Input;
typedef struct Instance Instance;
typedef struct Output Output;
typedef struct Request Request;
typedef struct Response Response;

enum { CPU_MEMORY = 0, FP32 = 11, FINAL = 1, RELEASE_ALL = 1 };

Error* TRITONBACKEND_RequestInput(Request*, const char* name, Input**);
Error* TRITONBACKEND_InputProperties(
    Input*, const char** name, int* type, const int64_t** shape, uint32_t* dims, uint64_t* bytes,
    uint32_t* buffers);
Error* TRITONBACKEND_ResponseNew(Response**, Request*);
Error* TRITONBACKEND_ResponseOutput(
    Response*, Output**, const char* name, int type, const int64_t* shape, uint32_t dims);
Error* TRITONBACKEND_OutputBuffer(Output*, void**, uint64_t bytes, int* memory, int64_t* place);
Error* TRITONBACKEND_ResponseSend(Response*, uint32_t flags, Error*);
Error* TRITONBACKEND_RequestRelease(Request*, uint32_t flags);
Error* TRITONBACKEND_ModelInstanceReportStatistics(
    Instance*, Request*, bool success, uint64_t began, uint64_t computes, uint64_t computed,
    uint64_t ended);
Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    Instance*, uint64_t rows, uint64_t began, uint64_t computes, uint64_t computed, uint64_t ended);

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void wait_until(uint64_t ns) {
  prctl(PR_SET_TIMERSLACK, 1ul); /* else the kernel adds 50 us to each wait */
  struct timespec moment = {ns / 1000000000ull, ns % 1000000000ull};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL)) {
  }
}

static void shape_of(Request* request, int64_t* rows, int64_t* places) {
  Input* input;
  const int64_t* shape;
  TRITONBACKEND_RequestInput(request, "input_ids", &input);
  TRITONBACKEND_InputProperties(input, NULL, NULL, &shape, NULL, NULL, NULL);
  *rows = shape[0];
  *places = shape[1];
}

static void answer(Request* request) {
  Response* response;
  Output* output;
  void* buffer;
  int memory = CPU_MEMORY;
  int64_t rows, places, place = 0;
  shape_of(request, &rows, &places);
#ifdef PER_TOKEN
  const int64_t shape[] = {rows, places, WIDTH};
  const uint64_t bytes = 4 * rows * places * WIDTH;
#else
  const int64_t shape[] = {rows, WIDTH};
  const uint64_t bytes = 4 * rows * WIDTH;
#endif
  TRITONBACKEND_ResponseNew(&response, request);
  TRITONBACKEND_ResponseOutput(
      response, &output, OUTPUT, FP32, shape, sizeof(shape) / sizeof(*shape));
  TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &place);
  memset(buffer, 0, bytes);
  TRITONBACKEND_ResponseSend(response, FINAL, NULL);
}

Error* TRITONBACKEND_ModelInstanceExecute(
    Instance* instance, Request** requests, const uint32_t count) {
  const uint64_t began = now_ns();
  int64_t all_rows = 0, tokens = 0;
  for (uint32_t i = 0; i < count; i++) {
    int64_t rows, places;
    shape_of(requests[i], &rows, &places);
    all_rows += rows;
    tokens += rows * places;
  }
  const uint64_t cost = BATCH_NS + ROW_NS * all_rows + TOKEN_NS * tokens;
  if (cost) wait_until(began + cost);
  const uint64_t computed = now_ns();
  for (uint32_t i = 0; i < count; i++) answer(requests[i]);
  const uint64_t ended = now_ns();
  for (uint32_t i = 0; i < count; i++) {
    TRITONBACKEND_ModelInstanceReportStatistics(
        instance, requests[i], true, began, began, computed, ended);
    TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL);
  }
  TRITONBACKEND_ModelInstanceReportBatchStatistics(
      instance, all_rows, began, began, computed, ended);
  return NULL;
}

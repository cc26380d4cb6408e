/* A core that takes as long as one on a GPU and leaves the processor alone: a Triton backend.

   A batch takes BATCH_NS + ROW_NS a row + TOKEN_NS a token, then every output is noise: numbers
   from 0 to 1, or classes below CLASSES. Compiled for one model: OUTPUTS are its outputs, INPUT one
   of its inputs, whose rows have ROW_TOKENS tokens, or as many as they are wide if it is 0. What is
   declared here is all of Triton's backend interface that it needs. */

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

enum { CPU_MEMORY = 0, INT32 = 8, FP32 = 11, FINAL = 1, RELEASE_ALL = 1 };
enum { CLASSES = 5, NOISE = 8191 };

typedef struct {
  const char* name;
  int type;
  int64_t shape[4]; /* without rows, ended by 0; -1 for the tokens of a row */
} Produced;

static const Produced outputs[] = OUTPUTS;

static union {
  float numbers[NOISE];
  int32_t classes[NOISE];
} noise[2]; /* FP32, INT32 */

__attribute__((constructor)) static void make_noise(void) {
  uint32_t drawn = 1;
  for (int i = 0; i < NOISE; i++) {
    drawn = drawn * 1664525u + 1013904223u;
    noise[0].numbers[i] = (drawn >> 8) / 16777216.0f;
    noise[1].classes[i] = (drawn >> 16) % CLASSES;
  }
}

static void fill(char* buffer, uint64_t bytes, int type) {
  const uint64_t all = sizeof noise[0];
  for (uint64_t done = 0; done < bytes; done += all) {
    const uint64_t rest = bytes - done;
    memcpy(buffer + done, &noise[type == INT32], rest < all ? rest : all);
  }
}


Error* TRITONBACKEND_RequestInput(Request*, const char* name, Input**);
Error* TRITONBACKEND_InputProperties(
    Input*, const char** name, int* type, const int64_t** shape, uint32_t* dims, uint64_t* bytes,
    uint32_t* buffers);
Error* TRITONBACKEND_ResponseNew(Response**, Request*);
Error* TRITONBACKEND_ResponseOutput(
    Response*, Output**, const char* name, int type, const int64_t* shape, uint32_t dims);
Error* TRITONBACKEND_OutputBuffer(Output*, void**, uint64_t bytes, int* memory, int64_t* device);
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

static void read_shape(Request* request, int64_t* rows, int64_t* width) {
  Input* input;
  const int64_t* shape;
  TRITONBACKEND_RequestInput(request, INPUT, &input);
  TRITONBACKEND_InputProperties(input, NULL, NULL, &shape, NULL, NULL, NULL);
  *rows = shape[0];
  *width = ROW_TOKENS ? ROW_TOKENS : shape[1];
}

static void answer(Request* request) {
  Response* response;
  int64_t rows, width;
  read_shape(request, &rows, &width);
  TRITONBACKEND_ResponseNew(&response, request);
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    Output* output;
    void* buffer;
    int memory = CPU_MEMORY;
    int64_t device = 0, shape[5] = {rows};
    uint64_t bytes = 4 * rows;
    uint32_t dims = 1;
    for (const int64_t* size = outputs[i].shape; *size; size++) {
      shape[dims] = *size < 0 ? width : *size;
      bytes *= shape[dims++];
    }
    TRITONBACKEND_ResponseOutput(
        response, &output, outputs[i].name, outputs[i].type, shape, dims);
    TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &device);
    fill(buffer, bytes, outputs[i].type);
  }
  TRITONBACKEND_ResponseSend(response, FINAL, NULL);
}

Error* TRITONBACKEND_ModelInstanceExecute(
    Instance* instance, Request** requests, const uint32_t count) {
  const uint64_t began = now_ns();
  int64_t all_rows = 0, tokens = 0;
  for (uint32_t i = 0; i < count; i++) {
    int64_t rows, width;
    read_shape(requests[i], &rows, &width);
    all_rows += rows;
    tokens += rows * width;
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

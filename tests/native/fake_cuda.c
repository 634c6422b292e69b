// A CUDA driver for the tests, without a GPU: a stream is a thread that works through a queue, device memory is
// host memory. It holds what the hand-off must not rely on: a call without a current context fails, host
// functions of all streams run one at a time, a captured graph replays the very same operations.
//
// The tests misconfigure it through fake_set and fake_fail. Built with WITHOUT_MEMOPS, WITHOUT_HOST_FUNC,
// WITHOUT_GRAPHS or WITHOUT_CONTEXT it lacks those functions.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_READY = 600 };
enum { CAPTURE_UNSUPPORTED = 900 };
enum { kCan64BitStreamMemOps = 122 };

// ------------------------------------------------------------------------------------------- settings

static struct {
  int version, devices, memops;  // what the driver says of itself
  int drop_writes;               // stream writes do not arrive
  int stuck_waits;               // stream waits never end
  int skip_waits;                // stream waits do not wait
  int skip_host_funcs;           // host functions are never called
  int no_captured_memops;        // stream writes and waits are refused in a capture
  int early_copies;              // of a graph, before what they have to wait for
} settings = {12080, 1, 1, 0, 0, 0, 0, 0, 0};

static char failing[64];
static int failing_code;
static int outstanding;  // allocations
static __thread int contexts;

void fake_set(const char* name, int value) {
#define SETTING(field) \
  if (!strcmp(name, #field)) settings.field = value;
  SETTING(version)
  SETTING(devices) SETTING(memops) SETTING(drop_writes) SETTING(stuck_waits) SETTING(skip_waits)
  SETTING(skip_host_funcs) SETTING(no_captured_memops) SETTING(early_copies)
}
void fake_fail(const char* call, int code) {
  strncpy(failing, call, sizeof failing - 1);
  failing_code = code;
}
int fake_outstanding(void) { return __atomic_load_n(&outstanding, __ATOMIC_SEQ_CST); }

#define MAY_FAIL \
  if (!strcmp(failing, __func__)) return failing_code;
#define NEEDS_CONTEXT \
  MAY_FAIL            \
  if (contexts == 0) return INVALID_CONTEXT;

// ------------------------------------------------------------------------------------------- streams

typedef struct {
  enum { WRITE, WAIT, COPY, CALL } kind;
  uint64_t to, from;  // addresses, or a value
  size_t bytes;
  void (*fn)(void*);
} Op;

typedef struct {
  Op* ops;
  int count, room;
} List;

typedef struct {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  List queue;
  int done, ending;  // operations of the queue that have ended
  List* graph;       // being captured
} Stream;

static pthread_mutex_t callbacks = PTHREAD_MUTEX_INITIALIZER;

static void append(List* list, Op op) {
  if (list->count == list->room) {
    list->room = list->room * 2 + 16;
    list->ops = realloc(list->ops, list->room * sizeof(Op));
  }
  list->ops[list->count++] = op;
}

static void nap(void) {
  const struct timespec time = {0, 20000};
  nanosleep(&time, NULL);
}

static void execute(const Op* op) {
  switch (op->kind) {
    case WRITE:
      if (!settings.drop_writes) __atomic_store_n((uint64_t*)op->to, op->from, __ATOMIC_SEQ_CST);
      break;
    case WAIT:
      while (!settings.skip_waits &&
             (settings.stuck_waits || __atomic_load_n((uint64_t*)op->to, __ATOMIC_SEQ_CST) < op->from)) {
        nap();
      }
      break;
    case COPY:
      memcpy((void*)op->to, (void*)op->from, op->bytes);
      break;
    case CALL:
      if (settings.skip_host_funcs) break;
      pthread_mutex_lock(&callbacks);
      op->fn((void*)op->from);
      pthread_mutex_unlock(&callbacks);
  }
}

static void* work(void* argument) {
  Stream* stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (stream->done == stream->queue.count && !stream->ending) {
      pthread_cond_wait(&stream->changed, &stream->lock);
    }
    if (stream->done == stream->queue.count) break;
    const Op op = stream->queue.ops[stream->done];
    pthread_mutex_unlock(&stream->lock);
    execute(&op);
    pthread_mutex_lock(&stream->lock);
    stream->done++;
    pthread_cond_broadcast(&stream->changed);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

static void enqueue(Stream* stream, Op op) {
  pthread_mutex_lock(&stream->lock);
  append(stream->graph ? stream->graph : &stream->queue, op);
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

int cuStreamCreate(Stream** stream, unsigned flags) {
  NEEDS_CONTEXT
  (void)flags;
  Stream* made = calloc(1, sizeof *made);
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->changed, NULL);
  pthread_create(&made->thread, NULL, work, made);
  *stream = made;
  return SUCCESS;
}
int cuStreamQuery(Stream* stream) {
  MAY_FAIL
  pthread_mutex_lock(&stream->lock);
  const int idle = stream->done == stream->queue.count;
  pthread_mutex_unlock(&stream->lock);
  return idle ? SUCCESS : NOT_READY;
}
int cuStreamSynchronize(Stream* stream) {
  MAY_FAIL
  while (cuStreamQuery(stream) == NOT_READY) nap();
  return SUCCESS;
}
int cuStreamDestroy_v2(Stream* stream) {
  pthread_mutex_lock(&stream->lock);
  stream->ending = 1;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  free(stream->queue.ops);
  free(stream);
  return SUCCESS;
}
int cuStreamIsCapturing(Stream* stream, int* status) {
  MAY_FAIL
  *status = stream->graph != NULL;
  return SUCCESS;
}

List* fake_begin_capture(Stream* stream) { return stream->graph = calloc(1, sizeof(List)); }
void fake_end_capture(Stream* stream) { stream->graph = NULL; }
void fake_launch(List* graph, Stream* stream) {
  for (int i = 0; i < graph->count && settings.early_copies; i++) {
    if (graph->ops[i].kind == COPY) execute(&graph->ops[i]);
  }
  for (int i = 0; i < graph->count; i++) {
    if (!settings.early_copies || graph->ops[i].kind != COPY) enqueue(stream, graph->ops[i]);
  }
}
int fake_graph_size(List* graph) { return graph->count; }
void fake_free_graph(List* graph) {
  free(graph->ops);
  free(graph);
}

// ---------------------------------------------------------------------------------- the driver's functions

int cuInit(unsigned flags) {
  MAY_FAIL
  return flags;
}
int cuDriverGetVersion(int* version) {
  *version = settings.version;
  return SUCCESS;
}
int cuGetErrorName(int error, const char** name) {
  if (error != OUT_OF_MEMORY && error != INVALID_CONTEXT) return INVALID_VALUE;
  *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_CONTEXT";
  return SUCCESS;
}
int cuDeviceGetCount(int* count) {
  MAY_FAIL
  *count = settings.devices;
  return SUCCESS;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == kCan64BitStreamMemOps ? settings.memops : 0;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  MAY_FAIL
  (void)device;
  *context = &settings;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device * 0; }
#ifndef WITHOUT_CONTEXT
int cuCtxPushCurrent_v2(void* context) {
  MAY_FAIL
  contexts += context == &settings;
  return SUCCESS;
}
#endif
int cuCtxPopCurrent_v2(void** context) {
  *context = &settings;
  contexts--;
  return SUCCESS;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  NEEDS_CONTEXT
  if (flags != 3) return INVALID_VALUE;  // portable and mapped
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  __atomic_add_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  return *memory ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemFreeHost(void* memory) {
  NEEDS_CONTEXT
  __atomic_sub_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  free(memory);
  return SUCCESS;
}
int cuMemHostGetDevicePointer_v2(uint64_t* device, void* memory, unsigned flags) {
  NEEDS_CONTEXT
  *device = (uint64_t)memory;
  return flags;
}
int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  NEEDS_CONTEXT
  *memory = (uint64_t)malloc(bytes);
  __atomic_add_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}
int cuMemFree_v2(uint64_t memory) {
  NEEDS_CONTEXT
  __atomic_sub_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  free((void*)memory);
  return SUCCESS;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
  NEEDS_CONTEXT
  enqueue(stream, (Op){COPY, to, from, bytes, NULL});
  return SUCCESS;
}
#ifndef WITHOUT_GRAPHS
int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  NEEDS_CONTEXT
  if (mode != 1) return INVALID_VALUE;  // of this thread alone
  fake_begin_capture(stream);
  __atomic_add_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}
int cuStreamEndCapture(Stream* stream, List** graph) {
  MAY_FAIL
  *graph = stream->graph;
  fake_end_capture(stream);
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(List** exec, List* graph, unsigned long long flags) {
  NEEDS_CONTEXT
  *exec = calloc(1, sizeof(List));
  for (int i = 0; i < graph->count; i++) append(*exec, graph->ops[i]);
  __atomic_add_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  return flags;
}
int cuGraphLaunch(List* exec, Stream* stream) {
  NEEDS_CONTEXT
  fake_launch(exec, stream);
  return SUCCESS;
}
int cuGraphDestroy(List* graph) {
  __atomic_sub_fetch(&outstanding, 1, __ATOMIC_SEQ_CST);
  fake_free_graph(graph);
  return SUCCESS;
}
int cuGraphExecDestroy(List* exec) { return cuGraphDestroy(exec); }
#endif
#ifndef WITHOUT_MEMOPS
int cuStreamWriteValue64_v2(Stream* stream, uint64_t at, uint64_t value, unsigned flags) {
  NEEDS_CONTEXT
  if (stream->graph && settings.no_captured_memops) return CAPTURE_UNSUPPORTED;
  enqueue(stream, (Op){WRITE, at, value, 0, NULL});
  return flags;
}
int cuStreamWaitValue64_v2(Stream* stream, uint64_t at, uint64_t value, unsigned flags) {
  NEEDS_CONTEXT
  if (stream->graph && settings.no_captured_memops) return CAPTURE_UNSUPPORTED;
  enqueue(stream, (Op){WAIT, at, value, 0, NULL});
  return flags;
}
#endif
#ifndef WITHOUT_HOST_FUNC
int cuLaunchHostFunc(Stream* stream, void (*fn)(void*), void* data) {
  NEEDS_CONTEXT
  enqueue(stream, (Op){CALL, 0, (uint64_t)data, 0, fn});
  return SUCCESS;
}
#endif

/* Calls the library as PyTorch and ONNX Runtime do, with work of its own on the driver. Usage: program WHAT. Exits with 0 if all is well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "aquifer.h"

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, aquifer_last_error());   \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

/* The function types of the hosts. */
typedef void *(*TorchAlloc)(size_t, int, void *);            /* torch::cuda::CUDAPluggableAllocator */
typedef void (*TorchFree)(void *, size_t, int, void *);
typedef void (*TorchRecordStream)(void *, void *);
typedef void *(*ExternalAlloc)(size_t size);                 /* onnxruntime::CUDAExternalAllocator */
typedef void (*ExternalFree)(void *p);
typedef void (*ExternalEmptyCache)(void);
static const TorchAlloc torch_alloc = aquifer_malloc;
static const TorchFree torch_free = aquifer_free;
static const TorchRecordStream torch_record_stream = aquifer_record_stream;
static const ExternalAlloc ort_alloc = aquifer_ort_alloc;
static const ExternalFree ort_free = aquifer_ort_free;
static const ExternalEmptyCache ort_empty_cache = aquifer_ort_empty_cache;

/* The driver, of which the program uses few functions, and the stand-in's steering. */
typedef struct { char *start; size_t capacity; size_t length; } Text;
typedef int (*Call0)(unsigned);
static int (*set_current)(void *), (*retain)(void **, int), (*memset_async)(unsigned long long, unsigned char, size_t, void *);
static int (*stream_create)(void **, unsigned), (*stream_call_destroy)(void *), (*stream_synchronize)(void *);
static int (*event_create)(void **, unsigned), (*event_record)(void *, void *), (*event_destroy)(void *), (*stream_wait)(void *, void *, unsigned);
static int (*begin_capture)(void *, int), (*end_capture)(void *, void **), (*instantiate)(void **, void *, unsigned long long);
static int (*graph_launch)(void *, void *);
static int (*violations)(unsigned, unsigned, Text *);
static void *context;

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void start_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define LOAD(variable, name) *(void **)&variable = symbol(library, name)
    Call0 init;
    LOAD(init, "cuInit");
    LOAD(retain, "cuDevicePrimaryCtxRetain");
    LOAD(set_current, "cuCtxSetCurrent");
    LOAD(memset_async, "cuMemsetD8Async");
    LOAD(stream_create, "cuStreamCreate");
    LOAD(stream_call_destroy, "cuStreamDestroy_v2");
    LOAD(stream_synchronize, "cuStreamSynchronize");
    LOAD(event_create, "cuEventCreate");
    LOAD(event_record, "cuEventRecord");
    LOAD(event_destroy, "cuEventDestroy_v2");
    LOAD(stream_wait, "cuStreamWaitEvent");
    LOAD(begin_capture, "cuStreamBeginCapture_v2");
    LOAD(end_capture, "cuStreamEndCapture");
    LOAD(instantiate, "cuGraphInstantiateWithFlags");
    LOAD(graph_launch, "cuGraphLaunch");
    LOAD(violations, "standin_violations");
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_current(context) == 0);
}

static void *new_stream(void)
{
    void *stream;
    CHECK(stream_create(&stream, 1) == 0);
    return stream;
}

static void fill(void *ptr, size_t bytes, void *stream)
{
    CHECK(memset_async((unsigned long long)ptr, 7, bytes, stream) == 0);
}

/* Orders the later work of one stream after the present work of another. */
static void order(void *later, void *after)
{
    void *event;
    CHECK(event_create(&event, 2) == 0 && event_record(event, after) == 0 && stream_wait(later, event, 0) == 0);
    event_destroy(event);
}

static void no_violations(void)
{
    char text[4096];
    for (unsigned device = 0; device < 2; device++) {
        Text buffer = {text, sizeof text, 0};
        CHECK(violations(device, 0, &buffer) == 0);
        if (buffer.length) {
            fprintf(stderr, "violations: %s\n", text);
            exit(1);
        }
    }
}

static unsigned draw(unsigned *seed, unsigned end)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % end;
}

/* A thread with two streams, each of which sometimes uses memory of the other. */
static void *work(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument;
    CHECK(set_current(context) == 0);
    void *streams[2] = {new_stream(), seed % 3 == 0 ? (void *)2 : seed % 3 == 1 ? NULL : new_stream()};
    void *live[16] = {0};
    size_t sizes[16] = {0};
    int owners[16] = {0};
    for (int step = 0; step < 600; step++) {
        unsigned at = draw(&seed, 16);
        if (live[at]) {
            torch_free(live[at], sizes[at], 0, streams[owners[at]]);
            live[at] = NULL;
            continue;
        }
        owners[at] = (int)draw(&seed, 2);
        void *own = streams[owners[at]], *other = streams[!owners[at]];
        sizes[at] = 1 + draw(&seed, 600000);
        live[at] = torch_alloc(sizes[at], 0, own);
        CHECK(live[at]);
        fill(live[at], sizes[at], own);
        if (draw(&seed, 4) == 0) {
            order(other, own);
            fill(live[at], sizes[at], other);
            torch_record_stream(live[at], other);
        }
    }
    for (int at = 0; at < 16; at++)
        if (live[at])
            torch_free(live[at], sizes[at], 0, streams[owners[at]]);
    return NULL;
}

static void threads(void)
{
    pthread_t threads[6];
    for (size_t i = 0; i < 6; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    CHECK(aquifer_memory_allocated(0) == 0);
    CHECK(aquifer_memory_reserved(0) > 0 && aquifer_max_memory_allocated(0) > 0);
    CHECK(aquifer_available_after(0, 0) > 100 << 20);
    CHECK(aquifer_available_after(0, 40 << 20) == aquifer_available_after(0, 0) - (40 << 20));
    CHECK(aquifer_empty_cache(-1) == AQUIFER_OK && aquifer_memory_reserved(0) == 0);
}

/* What a missing aquifer_record_stream leads to: the stand-in finds the race. */
static void careless(void)
{
    void *own = new_stream(), *other = new_stream(), *ptr = torch_alloc(1 << 20, 0, own);
    fill(ptr, 1 << 20, own);
    order(other, own);
    fill(ptr, 1 << 20, other);
    torch_free(ptr, 1 << 20, 0, own);
    ptr = torch_alloc(1 << 20, 0, own);
    fill(ptr, 1 << 20, own);
    torch_free(ptr, 1 << 20, 0, own);
}

/* Threads use and free what others allocated, each in the order of its own stream. */
static struct { void *ptr, *event; } handed[8];
static pthread_mutex_t handing = PTHREAD_MUTEX_INITIALIZER;

static void *hand_over(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument;
    CHECK(set_current(context) == 0);
    void *own = new_stream();
    for (int step = 0; step < 400; step++) {
        void *ptr = torch_alloc(1 << 20, 0, own), *event;
        CHECK(ptr && event_create(&event, 2) == 0);
        fill(ptr, 1 << 20, own);
        CHECK(event_record(event, own) == 0);
        unsigned at = draw(&seed, 8);
        pthread_mutex_lock(&handing);
        void *theirs = handed[at].ptr, *after = handed[at].event;
        handed[at].ptr = ptr;
        handed[at].event = event;
        pthread_mutex_unlock(&handing);
        if (theirs) {
            CHECK(stream_wait(own, after, 0) == 0);
            event_destroy(after);
            fill(theirs, 1 << 20, own);
            aquifer_free_on(theirs, own);
        }
    }
    return NULL;
}

/* Frees in the order of another stream than that of the allocation, also one that this library has not seen yet. */
static void elsewhere(void)
{
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, hand_over, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 8; i++)
        aquifer_free_on(handed[i].ptr, new_stream());
    void *own = new_stream(), *others[] = {new_stream(), NULL, (void *)2};
    for (int i = 0; i < 30; i++) {
        void *other = others[i % 3], *ptr = torch_alloc(1 << 20, 0, own);
        CHECK(ptr);
        fill(ptr, 1 << 20, own);
        order(other, own);
        fill(ptr, 1 << 20, other);
        aquifer_free_on(ptr, other);
        CHECK(aquifer_memory_allocated(0) == 0);
    }
    /* The stream of the allocation is gone, as PyTorch has it. */
    for (int i = 0; i < 100; i++) {
        void *gone = new_stream(), *ptr = torch_alloc(1 << 20, 0, gone);
        CHECK(ptr);
        fill(ptr, 1 << 20, gone);
        CHECK(aquifer_forget_stream(0, gone) == AQUIFER_OK && stream_call_destroy(gone) == 0);
        void *new = new_stream();
        if (i % 2)
            torch_free(torch_alloc(1 << 20, 0, new), 1 << 20, 0, new);
        torch_free(ptr, 1 << 20, 0, gone);
        CHECK(aquifer_memory_allocated(0) == 0 && !*aquifer_last_error());
    }
}

/* Handles of streams come back, for new streams. */
static void forget(void)
{
    for (int i = 0; i < 300; i++) {
        void *stream = new_stream();
        void *ptr = torch_alloc(100000 + 512 * i, 0, stream);
        CHECK(ptr);
        fill(ptr, 100000, stream);
        torch_free(ptr, 100000, 0, stream);
        CHECK(aquifer_forget_stream(0, stream) == AQUIFER_OK);
        CHECK(stream_call_destroy(stream) == 0);
    }
    CHECK(aquifer_forget_stream(0, NULL) == AQUIFER_OK);
}

static char seen[64];

static void give_up(const char *report, void *data)
{
    void **kept = data;
    snprintf(seen, sizeof seen, "%s", report);
    /* Another stream than that of the request, for the cache of streams. */
    torch_record_stream(*kept, new_stream());
    torch_free(*kept, 0, 0, NULL);
    *kept = NULL;
}

/* Asks for memory that is not there either. */
static void ask_again(const char *report, void *data)
{
    int *calls = data;
    CHECK(*report && ++*calls < 10);
    CHECK(!torch_alloc((size_t)1 << 33, 0, new_stream()) && aquifer_last_status() == AQUIFER_OUT_OF_MEMORY);
    CHECK(aquifer_empty_cache(-1) == AQUIFER_OK && aquifer_stats_json(0, NULL, 0) > 0);
    aquifer_on_oom(NULL, NULL);
}

static void oom(void)
{
    int calls = 0;
    aquifer_on_oom(ask_again, &calls);
    CHECK(!torch_alloc((size_t)1 << 32, 0, NULL) && strstr(aquifer_last_error(), "4.00 GiB") && calls > 0);
    void *kept = torch_alloc(1 << 20, 0, NULL), *stream = new_stream();
    aquifer_on_oom(give_up, &kept);
    CHECK(kept && !torch_alloc((size_t)1 << 32, 0, stream));
    CHECK(aquifer_last_status() == AQUIFER_OUT_OF_MEMORY && strstr(aquifer_last_error(), "4.00 GiB"));
    CHECK(!kept && strstr(aquifer_last_error(), seen));
    aquifer_on_oom(NULL, NULL);
    CHECK(!torch_alloc((size_t)-1, 0, stream) && aquifer_last_status() == AQUIFER_OUT_OF_MEMORY);
    CHECK(aquifer_set_limit(0, 64 << 20) == AQUIFER_OK && !torch_alloc(65 << 20, 0, stream));
    CHECK(aquifer_set_limit(0, UINT64_MAX) == AQUIFER_OK);
    void *ptr = torch_alloc(65 << 20, 0, stream);
    CHECK(ptr);
    torch_free(ptr, 65 << 20, 0, stream);
    CHECK(aquifer_trim_to(0, 0) == AQUIFER_OK && aquifer_memory_reserved(0) == 0);
    CHECK(aquifer_set_memory_fraction(0, 0.5) == AQUIFER_OK && aquifer_set_memory_fraction(0, 2) == AQUIFER_INVALID);
}

static void wrong(void)
{
    CHECK(aquifer_version() == AQUIFER_VERSION);
    CHECK(aquifer_last_status() == AQUIFER_OK && !*aquifer_last_error());
    CHECK(!torch_alloc(0, 0, NULL) && aquifer_last_status() == AQUIFER_OK);
    int devices[] = {-2, 77, 100000};
    for (int i = 0; i < 3; i++) {
        CHECK(!torch_alloc(1, devices[i], NULL) && aquifer_last_status() != AQUIFER_OK && *aquifer_last_error());
        CHECK(aquifer_empty_cache(devices[i]) != AQUIFER_OK && aquifer_memory_reserved(devices[i]) == 0);
    }
    torch_free(NULL, 0, 0, NULL);
    torch_free(NULL, 0, -1, NULL);
    char *before = strdup(aquifer_last_error());
    torch_free(NULL, 0, 77, NULL);
    CHECK(!strcmp(before, aquifer_last_error()));
    free(before);
    CHECK(!aquifer_pool_create(0, 4) && aquifer_last_status() == AQUIFER_INVALID);
    torch_record_stream(NULL, NULL);
    aquifer_free_on(NULL, NULL);
    char *ptr = torch_alloc(1000, 0, NULL);
    torch_free(ptr + 8, 1000, 0, NULL);
    CHECK(aquifer_last_status() == AQUIFER_INVALID);
    torch_record_stream(ptr + 8, NULL);
    aquifer_free_on(ptr + 8, NULL);
    torch_free(ptr, 1000, -1, NULL);
    CHECK(aquifer_memory_allocated(0) == 0);
    torch_free(ptr, 1000, 0, NULL);
    torch_free(ptr, 1000, -1, NULL);
    aquifer_free_on(ptr, NULL);
    CHECK(aquifer_save_snapshot(0, NULL) == AQUIFER_INVALID && aquifer_save_snapshot(0, "x.txt") == AQUIFER_INVALID);
    CHECK(!aquifer_allocation_size(ptr, NULL) && !aquifer_allocation_size(NULL, NULL) && aquifer_last_status() == AQUIFER_INVALID);
    CHECK(!aquifer_pool_malloc(99, 1, NULL) && aquifer_pool_release(99) == AQUIFER_INVALID);
    CHECK(!ort_alloc(1) && strstr(aquifer_last_error(), "aquifer_ort_bind"));
}

static void reports(void)
{
    void *ptr = torch_alloc(3 << 20, 0, NULL);
    size_t length = aquifer_stats_json(0, NULL, 0);
    char *text = malloc(length + 1), cut[8];
    CHECK(length > 1000 && aquifer_stats_json(0, text, length + 1) == length && strlen(text) == length);
    CHECK(strstr(text, "\"allocated_bytes.all.current\":3145728"));
    CHECK(aquifer_stats_json(0, cut, sizeof cut) == length && strlen(cut) == 7 && !strncmp(cut, text, 7));
    free(text);
    length = aquifer_snapshot_json(0, NULL, 0);
    text = malloc(length + 1);
    CHECK(aquifer_snapshot_json(0, text, length + 1) == length && strstr(text, "\"segments\""));
    free(text);
    CHECK(aquifer_save_snapshot(0, "snapshot.pickle") == AQUIFER_OK && access("snapshot.pickle", R_OK) == 0);
    torch_free(ptr, 3 << 20, 0, NULL);
    CHECK(aquifer_max_memory_allocated(0) == 3 << 20 && aquifer_reset_peak(0) == AQUIFER_OK);
    CHECK(aquifer_max_memory_allocated(0) == 0 && aquifer_max_memory_reserved(0) > 0);
}

static void pools(void)
{
    void *stream = new_stream(), *graph, *launchable;
    uint64_t pool = aquifer_pool_create(0, 0);
    void *plain = aquifer_pool_malloc(pool, 1 << 20, stream);
    CHECK(pool && plain);
    fill(plain, 1 << 20, stream);
    torch_free(plain, 1 << 20, 0, stream);
    /* A stream that captures gets memory of a pool alone. */
    CHECK(begin_capture(stream, 1) == 0);
    CHECK(!torch_alloc(1 << 20, 0, stream) && aquifer_last_status() == AQUIFER_DEVICE_ERROR);
    void *inside = aquifer_pool_malloc(pool, 1 << 20, stream);
    CHECK(inside);
    fill(inside, 1 << 20, stream);
    torch_free(inside, 1 << 20, 0, stream);
    CHECK(end_capture(stream, &graph) == 0 && aquifer_pool_end_captures(pool) == AQUIFER_OK);
    CHECK(instantiate(&launchable, graph, 0) == 0 && graph_launch(launchable, stream) == 0);
    void *outside = torch_alloc(1 << 20, 0, stream);
    CHECK(outside && outside != inside);
    fill(outside, 1 << 20, stream);
    torch_free(outside, 1 << 20, 0, stream);
    CHECK(graph_launch(launchable, stream) == 0 && stream_synchronize(stream) == 0);
    /* The same for all allocations of the thread. */
    CHECK(aquifer_graph_begin(pool, stream) == AQUIFER_DEVICE_ERROR && aquifer_graph_end(stream) == AQUIFER_INVALID);
    CHECK(begin_capture(stream, 1) == 0 && aquifer_graph_begin(pool, stream) == AQUIFER_OK);
    CHECK(aquifer_graph_begin(99999, stream) == AQUIFER_INVALID);
    inside = torch_alloc(1 << 20, 0, stream);
    CHECK(inside);
    fill(inside, 1 << 20, stream);
    torch_free(inside, 1 << 20, 0, stream);
    CHECK(end_capture(stream, &graph) == 0 && aquifer_graph_end(stream) == AQUIFER_OK);
    CHECK(instantiate(&launchable, graph, 0) == 0 && graph_launch(launchable, stream) == 0);
    outside = torch_alloc(1 << 20, 0, stream);
    CHECK(outside && outside != inside);
    torch_free(outside, 1 << 20, 0, stream);
    CHECK(graph_launch(launchable, stream) == 0 && stream_synchronize(stream) == 0);
    /* The end of one capture ends no other one of the pool: nothing is unmapped, which might break that. */
    void *other = new_stream();
    torch_free(torch_alloc(40 << 20, 0, stream), 40 << 20, 0, stream);
    CHECK(begin_capture(stream, 1) == 0 && begin_capture(other, 1) == 0);
    void *insides[] = {aquifer_pool_malloc(pool, 1 << 20, stream), aquifer_pool_malloc(pool, 1 << 20, other)};
    CHECK(insides[0] && insides[1]);
    CHECK(end_capture(stream, &graph) == 0 && aquifer_pool_end_captures(pool) == AQUIFER_OK);
    CHECK(aquifer_empty_cache(0) == AQUIFER_OK && aquifer_memory_reserved(0) >= 40 << 20);
    fill(insides[1], 1 << 20, other);
    CHECK(end_capture(other, &graph) == 0 && aquifer_pool_end_captures(pool) == AQUIFER_OK);
    torch_free(insides[0], 1 << 20, 0, stream);
    torch_free(insides[1], 1 << 20, 0, other);
    CHECK(aquifer_pool_release(pool) == AQUIFER_OK && aquifer_empty_cache(0) == AQUIFER_OK);
    CHECK(aquifer_memory_reserved(0) == 0);
}

static void *end_elsewhere(void *stream)
{
    CHECK(aquifer_graph_end(stream) == AQUIFER_INVALID && strstr(aquifer_last_error(), "began no graph"));
    return NULL;
}

/* A thread that joins a capture, and ends with it begun. */
static void *join_capture(void *given)
{
    uint64_t *arguments = given;
    void *captured = (void *)(uintptr_t)arguments[0];
    CHECK(set_current(context) == 0 && aquifer_graph_begin(arguments[1], captured) == AQUIFER_OK);
    void *inside = torch_alloc(1 << 20, 0, captured);
    CHECK(inside);
    fill(inside, 1 << 20, captured);
    torch_free(inside, 1 << 20, 0, captured);
    return NULL;
}

static void graphs(void)
{
    void *stream = new_stream(), *graph = NULL, *launchable, *inside, *lost;
    uint64_t pool = aquifer_pool_create(0, 0);
    pthread_t thread;
    CHECK(aquifer_graph_begin(pool, NULL) == AQUIFER_DEVICE_ERROR && aquifer_graph_end(NULL) == AQUIFER_INVALID);
    CHECK(aquifer_graph_begin(pool, stream) == AQUIFER_DEVICE_ERROR && strstr(aquifer_last_error(), "does not capture"));
    CHECK(begin_capture(stream, 2) == 0);
    CHECK(aquifer_graph_begin(pool + 99, stream) == AQUIFER_INVALID);
    CHECK(aquifer_graph_begin(pool, stream) == AQUIFER_OK);
    CHECK(aquifer_graph_begin(pool, stream) == AQUIFER_INVALID && strstr(aquifer_last_error(), "aquifer_graph_end first"));
    CHECK(pthread_create(&thread, NULL, end_elsewhere, stream) == 0 && pthread_join(thread, NULL) == 0);
    uint64_t arguments[] = {(uintptr_t)stream, pool};
    CHECK(pthread_create(&thread, NULL, join_capture, arguments) == 0 && pthread_join(thread, NULL) == 0);
    inside = torch_alloc(1 << 20, 0, stream);
    CHECK(inside);
    fill(inside, 1 << 20, stream);
    torch_free(inside, 1 << 20, 0, stream);
    CHECK(end_capture(stream, &graph) == 0 && aquifer_graph_end(stream) == AQUIFER_OK);
    CHECK(aquifer_graph_end(stream) == AQUIFER_INVALID);
    CHECK(instantiate(&launchable, graph, 0) == 0 && graph_launch(launchable, stream) == 0);
    CHECK(stream_synchronize(stream) == 0);
    /* A capture that breaks leaves nothing behind. */
    uint64_t reserved = aquifer_memory_reserved(0), other = aquifer_pool_create(0, 0);
    CHECK(begin_capture(stream, 2) == 0 && aquifer_graph_begin(other, stream) == AQUIFER_OK);
    lost = torch_alloc(8 << 20, 0, stream);
    CHECK(lost && stream_synchronize(stream) != 0);
    CHECK(end_capture(stream, &graph) != 0 && aquifer_graph_end(stream) == AQUIFER_OK);
    torch_free(lost, 8 << 20, 0, stream);
    CHECK(aquifer_pool_release(other) == AQUIFER_OK && aquifer_empty_cache(0) == AQUIFER_OK);
    CHECK(aquifer_memory_reserved(0) == reserved);
    void *outside = torch_alloc(1 << 20, 0, stream);
    CHECK(outside && outside != inside);
    torch_free(outside, 1 << 20, 0, stream);
    CHECK(graph_launch(launchable, stream) == 0 && stream_synchronize(stream) == 0);
    CHECK(aquifer_pool_release(pool) == AQUIFER_OK && aquifer_empty_cache(0) == AQUIFER_OK);
    CHECK(aquifer_memory_reserved(0) == 0);
}

static void sleeps(void)
{
    const size_t bytes = 4 << 20;
    void *stream = new_stream();
    uint64_t pool = aquifer_pool_create(0, 0);
    void *inside = aquifer_pool_malloc(pool, bytes, stream), *outside = torch_alloc(bytes, 0, stream);
    CHECK(inside && outside);
    fill(inside, bytes, stream);
    fill(outside, bytes, stream);
    CHECK(aquifer_sleep(0, 9) == AQUIFER_INVALID && aquifer_pool_sleep(pool, 9) == AQUIFER_INVALID);
    CHECK(aquifer_pool_sleep(99999, AQUIFER_SLEEP_SAVE) == AQUIFER_INVALID);
    CHECK(aquifer_pool_sleep(pool, AQUIFER_SLEEP_SAVE) == AQUIFER_OK && aquifer_memory_reserved(0) == bytes);
    fill(outside, bytes, stream);
    CHECK(aquifer_sleep(0, AQUIFER_SLEEP_ZERO) == AQUIFER_OK && aquifer_memory_reserved(0) == 0);
    CHECK(!torch_alloc(bytes, 0, stream) && aquifer_last_status() == AQUIFER_INVALID);
    CHECK(aquifer_pool_wake(pool) == AQUIFER_OK && aquifer_memory_reserved(0) == bytes);
    fill(inside, bytes, stream);
    CHECK(aquifer_wake(0) == AQUIFER_OK && aquifer_memory_reserved(0) == 2 * bytes);
    fill(outside, bytes, stream);
    torch_free(inside, bytes, 0, stream);
    torch_free(outside, bytes, 0, stream);
    CHECK(aquifer_pool_release(pool) == AQUIFER_OK && aquifer_empty_cache(0) == AQUIFER_OK);
    CHECK(aquifer_memory_reserved(0) == 0);
}

static void devices(void)
{
    void *other, *stream = new_stream(), *ptrs[2];
    CHECK(retain(&other, 1) == 0 && set_current(other) == 0);
    void *streams[] = {stream, new_stream()};
    for (int i = 0; i < 2; i++) {
        ptrs[i] = torch_alloc(1 << 20, i, streams[i]);
        CHECK(ptrs[i] && aquifer_memory_allocated(i) == 1 << 20);
        int device = -1;
        CHECK(aquifer_allocation_size(ptrs[i], &device) == 1 << 20 && device == i);
        CHECK(set_current(i ? other : context) == 0);
        fill(ptrs[i], 1 << 20, streams[i]);
    }
    /* These find the device by the pointer. */
    torch_record_stream(ptrs[1], NULL);
    for (int i = 0; i < 2; i++) {
        torch_free(ptrs[i], 1 << 20, -1, NULL);
        CHECK(aquifer_memory_allocated(i) == 0);
    }
    CHECK(aquifer_empty_cache(-1) == AQUIFER_OK && aquifer_memory_reserved(0) == 0 && aquifer_memory_reserved(1) == 0);
    CHECK(aquifer_enable_peer_access(0, 1) == AQUIFER_OK && aquifer_enable_peer_access(0, -1) == AQUIFER_INVALID);
}

static void ort(void)
{
    void *stream = new_stream();
    CHECK(aquifer_ort_bind(0, stream) == AQUIFER_OK);
    void *ptr = ort_alloc(1 << 20);
    CHECK(ptr);
    fill(ptr, 1 << 20, stream);
    ort_free(ptr);
    ort_free(NULL);
    CHECK(aquifer_memory_allocated(0) == 0 && aquifer_memory_reserved(0) > 0);
    ort_empty_cache();
    CHECK(aquifer_memory_reserved(0) == 0);
}

/* Whether the last call failed because the process was forked, with the same text as those before. */
static int is_forked(char *first)
{
    if (!*first)
        strncat(first, aquifer_last_error(), 4095);
    return aquifer_last_status() == AQUIFER_FORKED && !strcmp(first, aquifer_last_error());
}

static void forked(void)
{
    void *stream = new_stream(), *ptr = torch_alloc(1 << 20, 0, stream);
    torch_free(torch_alloc(1 << 20, 0, stream), 1 << 20, 0, stream);
    uint64_t pool = aquifer_pool_create(0, 0);
    pid_t child = fork();
    if (child == 0) {
        char first[4096] = "", buffer[16];
        void *streams[] = {stream, NULL, (void *)2, (void *)0x7000};
        for (int i = 0; i < 4; i++)
            CHECK(!torch_alloc(1 << 20, 0, streams[i]) && is_forked(first));
        CHECK(strstr(first, "forked") && strstr(first, "exec"));
        for (int device = -1; device < 200; device += 100)
            CHECK(!torch_alloc(1 << 20, device, NULL) && is_forked(first));
        CHECK(!aquifer_pool_malloc(pool, 1, stream) && is_forked(first) && !ort_alloc(1) && is_forked(first));
        CHECK(!aquifer_stats_json(0, NULL, 0) && is_forked(first) && !aquifer_snapshot_json(0, buffer, sizeof buffer) && is_forked(first));
        CHECK(!aquifer_memory_allocated(0) && is_forked(first) && !aquifer_memory_reserved(0) && is_forked(first));
        CHECK(!aquifer_max_memory_allocated(0) && is_forked(first) && !aquifer_max_memory_reserved(0) && is_forked(first));
        CHECK(!aquifer_allocation_size(ptr, NULL) && is_forked(first) && !aquifer_pool_create(0, 99) && is_forked(first));
        int statuses[] = {
            aquifer_forget_stream(0, stream), aquifer_empty_cache(-1), aquifer_empty_cache(0), aquifer_trim_to(0, 0), aquifer_set_limit(0, 1),
            aquifer_set_memory_fraction(0, 7), aquifer_reset_peak(0), aquifer_reset_accumulated(0), aquifer_save_snapshot(0, NULL),
            aquifer_save_snapshot(0, "x.txt"), aquifer_enable_peer_access(0, -1), aquifer_sleep(0, 99), aquifer_wake(0),
            aquifer_pool_sleep(pool, AQUIFER_SLEEP_ZERO), aquifer_pool_wake(99), aquifer_pool_end_captures(pool), aquifer_pool_release(pool),
            aquifer_ort_bind(0, stream), aquifer_graph_begin(pool, stream), aquifer_graph_end(stream),
        };
        for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
            CHECK(statuses[i] == AQUIFER_FORKED);
        torch_free(ptr, 1 << 20, 0, stream);
        torch_free(ptr, 1 << 20, -1, stream);
        torch_record_stream(ptr, stream);
        aquifer_free_on(ptr, stream);
        aquifer_on_oom(NULL, NULL);
        ort_free(ptr);
        ort_empty_cache();
        CHECK(is_forked(first));
        exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    torch_free(ptr, 1 << 20, 0, stream);
    CHECK(aquifer_pool_release(pool) == AQUIFER_OK && aquifer_memory_allocated(0) == 0);
}

static void *kept_until_exit;

static void at_exit(void)
{
    torch_free(kept_until_exit, 1 << 20, 0, NULL);
    torch_free(torch_alloc(1 << 20, 0, (void *)2), 1 << 20, 0, (void *)2);
}

static void *keep_memory(void *stream)
{
    CHECK(torch_alloc(1 << 20, 0, stream) && torch_alloc(1 << 20, 0, (void *)2));
    return NULL;
}

/* Ends with memory that is live, with a thread that ended before, and with one that allocates. */
static void *forever(void *stream)
{
    for (;;)
        torch_free(torch_alloc(1 << 20, 0, stream), 1 << 20, 0, stream);
    return NULL;
}

static void at_the_end(void)
{
    pthread_t thread;
    atexit(at_exit);
    kept_until_exit = torch_alloc(1 << 20, 0, NULL);
    CHECK(kept_until_exit && pthread_create(&thread, NULL, keep_memory, new_stream()) == 0);
    pthread_join(thread, NULL);
    CHECK(pthread_create(&thread, NULL, forever, new_stream()) == 0);
    usleep(10000);
}

/* Not a test: ns of a pair that the cache serves. */
static void *pairs(void *stream)
{
    const int count = 2000000;
    struct timespec begin, end;
    for (int round = 0; round < 3; round++) {
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < count; i++)
            torch_free(torch_alloc(1 << 20, 0, stream), 1 << 20, 0, stream);
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("%.1f ns\n", ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / count);
    }
    return NULL;
}

static void bench(void)
{
    pthread_t threads[2];
    printf("default stream\n");
    pairs(NULL);
    printf("a stream\n");
    pairs(new_stream());
    printf("two threads with a stream each\n");
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, pairs, new_stream());
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}

int main(int arguments, char **argument)
{
    const struct { const char *name; void (*run)(void); } all[] = {
        {"wrong", wrong}, {"threads", threads}, {"forget", forget}, {"oom", oom}, {"reports", reports}, {"pools", pools}, {"graphs", graphs}, {"sleeps", sleeps},
        {"careless", careless}, {"elsewhere", elsewhere}, {"devices", devices}, {"ort", ort}, {"forked", forked}, {"at_the_end", at_the_end}, {"bench", bench},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (arguments == 2 && !strcmp(argument[1], all[i].name)) {
            start_driver();
            all[i].run();
            no_violations();
            return 0;
        }
    return 2;
}

/* Uses memory as programs do that are linked to the CUDA driver, and checks what the driver says of it. Ends with 0 if all is as it should be.
 * With the argument `race` it frees memory in the order of a stream that does not wait for the work on it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;
typedef void *Handle;

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(Handle *, int);
int cuDevicePrimaryCtxReset_v2(int);
int cuCtxSetCurrent(Handle);
int cuCtxSynchronize(void);
int cuCtxCreate_v2(Handle *, unsigned, int);
int cuCtxDestroy_v2(Handle);
int cuCtxEnablePeerAccess(Handle, unsigned);
int cuStreamCreate(Handle *, unsigned);
int cuStreamDestroy_v2(Handle);
int cuStreamSynchronize(Handle);
int cuStreamWaitEvent(Handle, Handle, unsigned);
int cuStreamBeginCapture_v2(Handle, unsigned);
int cuStreamEndCapture(Handle, Handle *);
int cuGraphInstantiateWithFlags(Handle *, Handle, uint64_t);
int cuGraphLaunch(Handle, Handle);
int cuGraphExecDestroy(Handle);
int cuGraphDestroy(Handle);
int cuEventCreate(Handle *, unsigned);
int cuEventRecord(Handle, Handle);
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);
int cuMemAllocAsync(CUdeviceptr *, size_t, Handle);
int cuMemAllocFromPoolAsync(CUdeviceptr *, size_t, Handle, Handle);
int cuMemFreeAsync(CUdeviceptr, Handle);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr);
int cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, Handle);
int cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
int cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, Handle);
int cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
int cuDeviceGetDefaultMemPool(Handle *, int);
int cuPointerGetAttribute(void *, unsigned, CUdeviceptr);
int cuPointerGetAttributes(unsigned, unsigned *, void **, CUdeviceptr);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);          \
            exit(1);                                                         \
        }                                                                    \
    } while (0)
#define OK(call) CHECK((call) == 0)

static const size_t MIB = 1 << 20;
static Handle streams[3];
static Handle event;

static void after(Handle later, Handle earlier) {
    OK(cuEventRecord(event, earlier));
    OK(cuStreamWaitEvent(later, event, 0));
}

/* Blocks go from stream to stream, and are freed on the last one. */
static void hand_over(int orders) {
    unsigned seed = 7;
    for (int step = 0; step < 300; step++) {
        seed = seed * 1103515245 + 12345;
        Handle one = streams[step % 3], two = streams[(step + 1 + (seed >> 16) % 2) % 3];
        size_t bytes = 512 + (seed >> 8) % (3 * MIB);
        CUdeviceptr x, y;
        OK(cuMemAllocAsync(&x, bytes, one));
        OK(cuMemAllocAsync(&y, bytes, two));
        OK(cuMemsetD8Async(x, step, bytes, one));
        if (orders) after(two, one);
        OK(cuMemcpyDtoDAsync_v2(y, x, bytes, two));
        OK(cuMemFreeAsync(x, two));
        if (orders && step % 25 == 0) {
            unsigned char last;
            OK(cuStreamSynchronize(two));
            OK(cuMemcpyDtoH_v2(&last, y + bytes - 1, 1));
            CHECK(last == (unsigned char)step);
        }
        if (step % 4 == 0) {
            OK(cuMemFree_v2(y));
        } else {
            OK(cuMemFreeAsync(y, two));
        }
        if (step % 50 == 49) {
            /* Its work may still run. */
            OK(cuStreamDestroy_v2(streams[step / 50 % 3]));
            OK(cuStreamCreate(&streams[step / 50 % 3], 1));
        }
    }
}

/* Each thread has a stream of its own. */
static void *thread(void *context) {
    Handle own;
    CUdeviceptr block;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&own, 1));
    for (int step = 1; step <= 50; step++) {
        if (step % 10 == 0) {
            OK(cuMemAlloc_v2(&block, step * 4096));
        } else {
            OK(cuMemAllocAsync(&block, step * 4096, own));
        }
        OK(cuMemsetD8Async(block, step, step * 4096, own));
        if (step % 10 == 1) {
            OK(cuMemFree_v2(block));
        } else {
            OK(cuMemFreeAsync(block, own));
        }
    }
    OK(cuStreamDestroy_v2(own));
    return NULL;
}

static void in_threads(Handle context) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) OK(pthread_create(&threads[i], NULL, thread, context));
    for (int i = 0; i < 4; i++) OK(pthread_join(threads[i], NULL));
}

static void plain(void) {
    CUdeviceptr blocks[8];
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 8; i++) {
            OK(cuMemAlloc_v2(&blocks[i], (i + 1) * MIB));
            OK(cuMemsetD8Async(blocks[i], i, (i + 1) * MIB, streams[(round + i) % 3]));
        }
        for (int i = 0; i < 8; i++) OK(cuMemFree_v2(blocks[i]));
    }
}

static void describe(void *driver) {
    CUdeviceptr block, start, range;
    size_t bytes, free_before, free_with, free_after, total;
    int ordinal;
    OK(cuMemGetInfo_v2(&free_before, &total));
    OK(cuMemAlloc_v2(&block, 64 * MIB));
    OK(cuMemGetInfo_v2(&free_with, &total));
    CHECK(free_before - free_with == 64 * MIB && free_with < total);
    OK(cuMemGetAddressRange_v2(&start, &bytes, block + 12345));
    CHECK(start == block && bytes == 64 * MIB);
    OK(cuPointerGetAttribute(&range, 11, block + 5));
    OK(cuPointerGetAttribute(&bytes, 12, block + 5));
    OK(cuPointerGetAttribute(&ordinal, 9, block + 5));
    CHECK(range == block && bytes == 64 * MIB && ordinal == 0);
    CHECK(cuPointerGetAttribute(NULL, 12, block) != 0);
    unsigned attributes[] = {12, 9, 11};
    void *data[] = {&bytes, &ordinal, &range};
    range = bytes = 0;
    OK(cuPointerGetAttributes(3, attributes, data, block + MIB));
    CHECK(range == block && bytes == 64 * MIB && ordinal == 0);

    char handle[64];
    int (*share)(void *, CUdeviceptr) = (int (*)(void *, CUdeviceptr))dlsym(driver, "cuIpcGetMemHandle");
    CHECK(share && share(handle, block) == 801);
    OK(cuMemFree_v2(block));
    OK(cuMemGetInfo_v2(&free_after, &total));
    CHECK(free_after == free_before);
    CHECK(cuMemFree_v2(block) != 0);
    CHECK(cuMemGetAddressRange_v2(&start, &bytes, 12345) != 0);
}

/* By name, the functions that are served are those of the library in front, and others are the driver's. */
static void names(void *driver) {
    void *found = NULL;
    int status = -1;
    Dl_info front, behind;
    OK(cuGetProcAddress_v2("cuMemAlloc", &found, 12080, 0, &status));
    CHECK(found == dlsym(driver, "cuMemAlloc_v2") && status == 0);
    CHECK(dladdr(found, &front) != 0);
    OK(cuGetProcAddress_v2("cuMemcpyDtoDAsync", &found, 12080, 0, &status));
    CHECK(found == dlsym(driver, "cuMemcpyDtoDAsync_v2"));
    CHECK(dladdr(found, &behind) != 0 && front.dli_fbase != behind.dli_fbase);
    CHECK(cuGetProcAddress_v2("cuNothing", &found, 12080, 0, &status) == 500);
    CHECK(dlsym(driver, "cuNothing") == NULL);
    OK(cuGetProcAddress_v2("cuGetProcAddress", &found, 12080, 0, &status));
    CHECK(found == dlsym(driver, "cuGetProcAddress_v2"));
}

/* Allocations of the default pool are served. What is allocated while a stream captures is the
 * driver's, and each launch has it again. */
static void pools_and_capture(void) {
    Handle pool, graph = NULL, executable = NULL;
    CUdeviceptr block;
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemAllocFromPoolAsync(&block, MIB, pool, streams[0]));
    OK(cuMemsetD8Async(block, 1, MIB, streams[0]));
    OK(cuMemFreeAsync(block, streams[0]));
    CHECK(cuMemAllocFromPoolAsync(&block, MIB, (Handle)0x77, streams[0]) != 0);
    OK(cuStreamBeginCapture_v2(streams[0], 2));
    OK(cuMemAllocAsync(&block, 8 * MIB, streams[0]));
    OK(cuMemsetD8Async(block, 1, 8 * MIB, streams[0]));
    OK(cuMemFreeAsync(block, streams[0]));
    OK(cuStreamEndCapture(streams[0], &graph));
    OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    for (int launch = 0; launch < 1000; launch++) OK(cuGraphLaunch(executable, streams[0]));
    OK(cuStreamSynchronize(streams[0]));
    OK(cuGraphExecDestroy(executable));
    OK(cuGraphDestroy(graph));
}

/* Memory of a graph that its work does not free is the driver's, too: the program frees it, or the next launch of a graph that was
 * instantiated so. */
static void graph_memory(void) {
    for (int frees = 0; frees < 2; frees++) {
        Handle graph = NULL, executable = NULL;
        CUdeviceptr block, served;
        size_t free_before, free_with, total;
        OK(cuMemGetInfo_v2(&free_before, &total));
        OK(cuStreamBeginCapture_v2(streams[0], 2));
        OK(cuMemAllocAsync(&block, 8 * MIB, streams[0]));
        OK(cuMemsetD8Async(block, 1, 8 * MIB, streams[0]));
        OK(cuStreamEndCapture(streams[0], &graph));
        OK(cuGraphInstantiateWithFlags(&executable, graph, frees));
        OK(cuGraphLaunch(executable, streams[0]));
        if (frees) {
            for (int launch = 0; launch < 1000; launch++) OK(cuGraphLaunch(executable, streams[0]));
        } else {
            CHECK(cuGraphLaunch(executable, streams[0]) == 1);
            OK(cuMemFreeAsync(block, streams[0]));
            OK(cuGraphLaunch(executable, streams[0]));
        }
        OK(cuMemAllocAsync(&served, 8 * MIB, streams[0]));
        CHECK(served != block);
        OK(cuMemFreeAsync(served, streams[0]));
        OK(cuMemFreeAsync(block, streams[0]));
        CHECK(cuMemFreeAsync(block, streams[0]) != 0);
        OK(cuStreamSynchronize(streams[0]));
        OK(cuGraphExecDestroy(executable));
        OK(cuGraphDestroy(graph));
        OK(cuStreamSynchronize(streams[0]));
        OK(cuMemGetInfo_v2(&free_with, &total));
        CHECK(free_with == free_before);
    }
}

/* Memory that was served before the capture cannot be freed in it, as with the driver's own: the capture breaks, the memory stays. */
static void freed_in_capture(void) {
    Handle graph = NULL;
    CUdeviceptr block;
    OK(cuMemAllocAsync(&block, MIB, streams[0]));
    OK(cuStreamBeginCapture_v2(streams[0], 2));
    CHECK(cuMemFreeAsync(block, streams[0]) != 0);
    CHECK(cuStreamEndCapture(streams[0], &graph) != 0 && graph == NULL);
    OK(cuMemsetD8Async(block, 1, MIB, streams[0]));
    OK(cuMemFreeAsync(block, streams[0]));
}

/* Memory of another context than the primary one is the driver's. */
static void other_context(Handle primary) {
    Handle context;
    CUdeviceptr block;
    OK(cuCtxCreate_v2(&context, 0, 0));
    OK(cuMemAlloc_v2(&block, MIB));
    OK(cuMemFree_v2(block));
    OK(cuCtxDestroy_v2(context));
    OK(cuCtxSetCurrent(primary));
}

/* The second device reaches the first one's memory, from before and after it was let in. */
static void peers(void *driver, Handle primary) {
    struct {
        uint64_t start, bytes, devices;
        char rest[8];
    } mapped;
    int (*mapping)(int, uint64_t, void *) = (int (*)(int, uint64_t, void *))dlsym(driver, "standin_mapping");
    Handle other;
    CUdeviceptr blocks[2];
    OK(cuMemAlloc_v2(&blocks[0], 200 * MIB));
    OK(cuDevicePrimaryCtxRetain(&other, 1));
    OK(cuCtxSetCurrent(other));
    OK(cuCtxEnablePeerAccess(primary, 0));
    OK(cuCtxSetCurrent(primary));
    OK(cuMemAlloc_v2(&blocks[1], 300 * MIB));
    for (int i = 0; i < 2; i++) {
        /* Memory in segments is no mapping, and the driver lets the device in. */
        if (mapping(0, blocks[i], &mapped) == 0) CHECK(mapped.devices == 3);
        OK(cuMemFree_v2(blocks[i]));
    }
}

struct buffer {
    char *start;
    size_t capacity, length;
};

/* How often the driver was asked something. */
static uint64_t calls(void *driver, const char *function) {
    uint64_t found = 0;
    int (*ask)(int, const char *, uint64_t *) = (int (*)(int, const char *, uint64_t *))dlsym(driver, "standin_calls");
    CHECK(ask);
    OK(ask(0, function, &found));
    return found;
}

/* What the driver keeps for graphs serves a request that would be refused otherwise. */
static void kept_for_graphs(void *driver) {
    CUdeviceptr block;
    size_t free_bytes, total;
    int (*keep)(int, uint64_t, uint64_t) = (int (*)(int, uint64_t, uint64_t))dlsym(driver, "standin_set_kept_bytes");
    CHECK(keep);
    OK(cuCtxSynchronize());
    OK(cuMemGetInfo_v2(&free_bytes, &total));
    OK(keep(0, 0, free_bytes - 22 * MIB));
    OK(cuMemAllocAsync(&block, free_bytes - 100 * MIB, streams[0]));
    OK(cuMemFreeAsync(block, streams[0]));
    CHECK(calls(driver, "cuDeviceGraphMemTrim") > 0);
}

/* Serving an allocation or a free asks the driver three things, each once. */
static void asks_little(void *driver) {
    const char *questions[] = {"cuStreamGetCtx", "cuStreamIsCapturing", "cuStreamGetId"};
    uint64_t before[3];
    CUdeviceptr block;
    for (int i = 0; i < 3; i++) before[i] = calls(driver, questions[i]);
    for (int pair = 0; pair < 100; pair++) {
        OK(cuMemAllocAsync(&block, MIB, streams[0]));
        OK(cuMemFreeAsync(block, streams[0]));
    }
    for (int i = 0; i < 3; i++) {
        uint64_t asked = calls(driver, questions[i]) - before[i];
        if (asked != 200) fprintf(stderr, "%s: %llu\n", questions[i], (unsigned long long)asked);
        CHECK(asked == 200);
    }
}

/* In a forked child every function that is served gives one code, the one that CUDA has for that. */
static void forked(void *driver) {
    const char *plain[] = {"cuMemFreeAsync_ptsz", "cuIpcGetMemHandle", "cuMemPoolSetAccess", "cuDeviceSetMemPool"};
    CUdeviceptr block, found;
    Handle pool;
    size_t bytes, total;
    unsigned attributes[] = {12};
    void *data[] = {&bytes};
    OK(cuMemAllocAsync(&block, MIB, streams[0]));
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    pid_t child = fork();
    if (child == 0) {
        int codes[] = {
            cuMemAlloc_v2(&found, MIB), cuMemAlloc_v2(&found, 0), cuMemAlloc_v2(NULL, MIB), cuMemAllocAsync(&found, MIB, streams[0]),
            cuMemAllocAsync(&found, MIB, (Handle)0x77), cuMemAllocFromPoolAsync(&found, MIB, pool, streams[0]),
            cuMemAllocFromPoolAsync(&found, MIB, (Handle)0x77, streams[0]), cuMemFree_v2(block), cuMemFree_v2(0), cuMemFree_v2(77),
            cuMemFreeAsync(block, streams[0]), cuMemFreeAsync(77, streams[0]), cuMemGetInfo_v2(&bytes, &total), cuMemGetInfo_v2(NULL, NULL),
            cuMemGetAddressRange_v2(&found, &bytes, block), cuMemGetAddressRange_v2(&found, &bytes, 77),
            cuPointerGetAttribute(&bytes, 12, block), cuPointerGetAttribute(&bytes, 9, block), cuPointerGetAttribute(NULL, 12, block),
            cuPointerGetAttributes(1, attributes, data, block), cuPointerGetAttributes(1, attributes, data, 77),
            cuStreamDestroy_v2(streams[0]), cuStreamDestroy_v2((Handle)0x77), cuCtxEnablePeerAccess((Handle)0x77, 0),
            cuDevicePrimaryCtxReset_v2(0),
        };
        for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
            if (codes[i] != 3) fprintf(stderr, "call %zu: %d\n", i, codes[i]);
            CHECK(codes[i] == 3);
        }
        for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
            int (*call)(uint64_t, uint64_t, uint64_t) = (int (*)(uint64_t, uint64_t, uint64_t))dlsym(driver, plain[i]);
            CHECK(call && call(0, 0, 0) == 3);
        }
        exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(cuMemFreeAsync(block, streams[0]));
}

int main(int count, char **arguments) {
    Handle context;
    int races = count > 1 && strcmp(arguments[1], "race") == 0;
    void *driver = dlopen("libcuda.so", RTLD_NOW);
    CHECK(driver);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuEventCreate(&event, 2));
    for (int i = 0; i < 3; i++) OK(cuStreamCreate(&streams[i], 1));
    if (!races) in_threads(context);
    hand_over(!races);
    if (!races) {
        plain();
        OK(cuCtxSynchronize());
        describe(driver);
        names(driver);
        pools_and_capture();
        graph_memory();
        freed_in_capture();
        asks_little(driver);
        forked(driver);
        other_context(context);
        OK(cuCtxSynchronize());
        peers(driver, context);
        kept_for_graphs(driver);
    }
    OK(cuCtxSynchronize());

    char text[4096] = "";
    struct buffer found = {text, sizeof text, 0};
    int (*violations)(int, int, struct buffer *) = (int (*)(int, int, struct buffer *))dlsym(driver, "standin_violations");
    CHECK(violations);
    OK(violations(0, 0, &found));
    if (races) return found.length > 0 ? 0 : 1;
    if (found.length > 0) fprintf(stderr, "%s\n", text);
    /* The last thing that many programs do. */
    OK(cuDevicePrimaryCtxReset_v2(0));
    return found.length > 0;
}

/* Opens the driver's library under the names that are given, allocates 1 MiB through each, and prints a line for each: the file that the
 * function is from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *symbol(void *library, const char *name) {
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(1);
    }
    return found;
}

int main(int count, char **names) {
    for (int i = 1; i < count; i++) {
        void *library = dlopen(names[i], RTLD_NOW), *context;
        unsigned long long ptr;
        Dl_info from;
        int (*init)(unsigned) = (int (*)(unsigned))symbol(library, "cuInit");
        int (*retain)(void **, int) = (int (*)(void **, int))symbol(library, "cuDevicePrimaryCtxRetain");
        int (*set_current)(void *) = (int (*)(void *))symbol(library, "cuCtxSetCurrent");
        int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))symbol(library, "cuMemAlloc_v2");
        if (init(0) || retain(&context, 0) || set_current(context) || allocate(&ptr, 1 << 20) || !dladdr((void *)allocate, &from)) return 2;
        puts(from.dli_fname);
        dlclose(library);
    }
    return 0;
}

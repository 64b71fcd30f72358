// Names the code that CUDA's driver loads, and when: one line each, "seconds bytes names". Loaded by the driver itself:
//   cc -shared -fPIC -o load_trace.so load_trace.c -I$CUPTI/include -L$CUPTI/lib -lcupti
//   CUDA_INJECTION64_PATH=load_trace.so LOAD_TRACE=/tmp/loads.txt kt serve ...
#define _GNU_SOURCE
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static FILE* out;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// Sections of a cubin are called ".text." and the kernel's name.
static void names(const char* cubin, size_t bytes) {
  const char *at = cubin, *end = cubin + bytes, mark[] = ".text.";
  for (int found = 0; found < 4 && (at = memmem(at, end - at, mark, 6)) != NULL; at += 6, ++found)
    fprintf(out, " %.80s", at + 6);
}

static void CUPTIAPI on_event(void* user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  (void)user;
  if (domain != CUPTI_CB_DOMAIN_RESOURCE || id != CUPTI_CBID_RESOURCE_MODULE_LOADED) return;
  const CUpti_ModuleResourceData* module = ((const CUpti_ResourceData*)data)->resourceDescriptor;
  fprintf(out, "%.6f %zu", now(), module->cubinSize);
  if (module->pCubin) names(module->pCubin, module->cubinSize);
  fputc('\n', out);
  fflush(out);
}

int InitializeInjection(void) {
  const char* path = getenv("LOAD_TRACE");
  char own[4096];
  if (!path) return 0;
  snprintf(own, sizeof own, "%s.%d", path, getpid());
  CUpti_SubscriberHandle handle;
  if (!(out = fopen(own, "a")) || cuptiSubscribe(&handle, (CUpti_CallbackFunc)on_event, NULL) != CUPTI_SUCCESS) return 0;
  cuptiEnableCallback(1, handle, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED);
  return 1;
}

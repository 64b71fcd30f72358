// llama.cpp in turns with another engine: llama_turns FILE THREADS. It reads lines "prompt TOKENS" or "decode TOKENS",
// and answers each with seconds and with seconds of CPU time. Tokens are random. "logits TOKENS IN OUT": int32 ids of
// the file IN become float32 logits of each in the file OUT. `gguf_types.py` compiles it against a build of llama.cpp.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "llama.h"

namespace {

constexpr int kContext = 4096, kFirstTokens = 16;

struct Peer {
  llama_context* context;
  int vocabulary;
  std::mt19937 dice{1};

  void decode(int tokens) {
    std::vector<llama_token> ids;
    for (int i = 0; i < tokens; ++i) ids.push_back(llama_token(dice() % unsigned(vocabulary)));
    if (llama_decode(context, llama_batch_get_one(ids.data(), tokens))) std::exit(1);
    llama_synchronize(context);
  }
  // Logits of all rows go to a file as one block; whoever reads it knows the vocabulary.
  void write_logits(int tokens, const char* in, const char* out) {
    std::vector<llama_token> ids(size_t(tokens), 0);
    FILE* source = std::fopen(in, "rb");
    if (!source || std::fread(ids.data(), sizeof(llama_token), ids.size(), source) != ids.size()) std::exit(1);
    std::fclose(source);
    llama_batch batch = llama_batch_init(tokens, 0, 1);
    batch.n_tokens = tokens;
    for (int i = 0; i < tokens; ++i) {
      batch.token[i] = ids[size_t(i)], batch.pos[i] = i, batch.logits[i] = 1;
      batch.n_seq_id[i] = 1, batch.seq_id[i][0] = 0;
    }
    if (llama_decode(context, batch)) std::exit(1);
    FILE* target = std::fopen(out, "wb");
    for (int i = 0; target && i < tokens; ++i)
      std::fwrite(llama_get_logits_ith(context, i), sizeof(float), size_t(vocabulary), target);
    if (!target || std::fclose(target)) std::exit(1);
    llama_batch_free(batch);
  }
  void forget() { llama_memory_clear(llama_get_memory(context), true); }
};

double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

template <class Body>
void tell_seconds(Body body) {
  const double began = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID);
  body();
  std::printf("%.6f %.6f\n", now(CLOCK_MONOTONIC) - began, now(CLOCK_PROCESS_CPUTIME_ID) - used);
  std::fflush(stdout);
}

}  // namespace

int main(int, char** words) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  llama_model_params model_parameters = llama_model_default_params();
  model_parameters.n_gpu_layers = 0;
  llama_model* model = llama_model_load_from_file(words[1], model_parameters);
  if (!model) return std::fprintf(stderr, "%s cannot be read\n", words[1]), 1;
  llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = kContext;
  parameters.n_batch = kContext;
  parameters.n_ubatch = 512;
  parameters.n_threads = parameters.n_threads_batch = std::atoi(words[2]);
  parameters.no_perf = true;
  Peer peer{llama_init_from_model(model, parameters), llama_vocab_n_tokens(llama_model_get_vocab(model))};
  if (!peer.context) return std::fprintf(stderr, "no context\n"), 1;
  char what[16];
  int tokens;
  while (std::scanf("%15s %d", what, &tokens) == 2) {
    peer.forget();
    if (!std::strcmp(what, "logits")) {
      char in[4096], out[4096];
      if (std::scanf("%4095s %4095s", in, out) != 2) return 1;
      tell_seconds([&] { peer.write_logits(tokens, in, out); });
      continue;
    }
    if (!std::strcmp(what, "prompt")) {
      tell_seconds([&] { peer.decode(tokens); });
      continue;
    }
    peer.decode(kFirstTokens);
    tell_seconds([&] {
      for (int i = 0; i < tokens; ++i) peer.decode(1);
    });
  }
}

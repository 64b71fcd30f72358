#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings/bindings.h"
#include "bindings/tensor.h"
#include "experts/handoff/mailbox.h"
#include "experts/handoff/post_thread.h"

namespace nb = nanobind;

namespace tandem {
namespace {

MailboxShape shape_of(int64_t tokens, int64_t hidden, int64_t top_k, bool late) {
  if (tokens < 1 || hidden < 1 || top_k < 1) throw KernelError("a mailbox needs tokens, hidden and top_k >= 1");
  return {tokens, hidden, top_k, late};
}

void make_mailbox(Mailbox* self, nb::handle memory, int64_t tokens, int64_t hidden, int64_t top_k, bool late) {
  const MailboxShape shape = shape_of(tokens, hidden, top_k, late);
  const TensorView view = view_of(memory, "memory", {Element::byte}, {mailbox_offsets(shape).bytes}, true);
  if (reinterpret_cast<uintptr_t>(view.data) % 128 != 0) throw KernelError("memory is not aligned to 128 bytes");
  new (self) Mailbox(static_cast<uint8_t*>(view.data), shape);
}

nb::tuple offsets(int64_t tokens, int64_t hidden, int64_t top_k, bool late) {
  const MailboxOffsets at = mailbox_offsets(shape_of(tokens, hidden, top_k, late));
  return nb::make_tuple(at.x, at.ids, at.weights, at.result, at.hints, at.half, at.bytes);
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<Meanwhile>(m, "Meanwhile", "Work in pieces of microseconds, see csrc/runtime/meanwhile.h.")
      .def(
          "next", [](Meanwhile& work) { return work.next() == Meanwhile::Progress::did; },
          "Does a piece; False: nothing can be done, now or any more. As the thread that answers posts.")
      .def(
          "next_of_step", [](Meanwhile& work) { return work.next_of_step() == Meanwhile::Progress::did; },
          "Likewise, a piece of the step's thread, which may call CUDA's driver.")
      .def_prop_ro("seconds", &Meanwhile::seconds, "That `next` took, all together.")
      .def_prop_ro("late_seconds", &Meanwhile::late_seconds, "Of these, what pieces took beyond their time.");
  nb::class_<Mailbox>(m, "Mailbox",
                      "The CPU's end of the hand-off from a CUDA stream, see csrc/experts/handoff/mailbox.h.")
      .def("__init__", &make_mailbox, nb::arg("memory"), nb::arg("tokens"), nb::arg("hidden"), nb::arg("top_k"),
           nb::arg("late") = false, nb::keep_alive<1, 2>())
      .def("add", &Mailbox::add, nb::arg("layer"), "Returns the number that posts call the layer by.")
      .def(
          "defer", [](Mailbox& m, int layer, int64_t kept, int64_t routed) { m.defer(layer, {kept, routed}); },
          nb::arg("layer"), nb::arg("kept"), nb::arg("routed"),
          "Of a token's first `routed` experts only the `kept` of the largest weights are in this layer's answer.")
      .def("meanwhile", &Mailbox::meanwhile, nb::arg("work"),
           "Pieces of it are done until the next `PostThread.finish`, while nothing is posted.")
      .def_prop_ro("is_open", &Mailbox::is_open, "Between `PostThread.begin` and the end of `finish`.")
      .def_prop_ro("posts", &Mailbox::posts)
      .def_prop_ro("experts_used", &Mailbox::experts_used, "By all posts, each expert counted once per post.")
      .def_prop_ro("wait_seconds", &Mailbox::wait_seconds, "Time spent until posts came.")
      .def_prop_ro("serve_seconds", &Mailbox::serve_seconds, "Time from posts to their answers.")
      .def_prop_ro(
          "hinted", [](const Mailbox& m) { return m.foresight().hinted(); }, "Experts, each once per post.")
      .def_prop_ro(
          "hits", [](const Mailbox& m) { return m.foresight().hits(); }, "Of those, that the post asked for.")
      .def_prop_ro(
          "bytes_ahead", [](const Mailbox& m) { return m.foresight().bytes(); },
          "Of hinted experts' weights that were fetched before they were computed.")
      .def("reset", &Mailbox::reset, "After a failure, when no kernel of the stream is running any more.");
  nb::class_<PostThread>(m, "PostThread", "Answers a mailbox's posts, see csrc/experts/handoff/post_thread.h.")
      .def(nb::init<std::shared_ptr<Mailbox>>(), nb::arg("mailbox"))
      .def("begin", &PostThread::begin, nb::arg("posts"), nb::arg("timeout_seconds"),
           "Before a graph with so many posts is started; UNTIL_STOPPED: nobody knows how many.")
      .def("finish", &PostThread::finish, nb::call_guard<nb::gil_scoped_release>(),
           "Returns when all posts are answered; raises what went wrong. Does pieces of `meanwhile` until then.")
      .def("cancel", &PostThread::cancel, "By any thread: `finish` raises; the GPU is told not to wait.")
      .def("stop", &PostThread::stop, "By any thread: `begin(UNTIL_STOPPED)` ends once nothing is posted.")
      .def("end", &PostThread::end, nb::call_guard<nb::gil_scoped_release>(), "Cancels; nothing can be begun again.");
  m.attr("UNTIL_STOPPED") = kUntilStopped;
  m.attr("SECOND_HALF") = uint32_t(kSecondHalf);
  m.attr("LAST_POST") = uint32_t(kLastPost);
  m.def("_end_post_threads", &end_post_threads, nb::call_guard<nb::gil_scoped_release>());
  nb::module_::import_("atexit").attr("register")(m.attr("_end_post_threads"));
  m.def("mailbox_offsets", &offsets, nb::arg("tokens"), nb::arg("hidden"), nb::arg("top_k"), nb::arg("late") = false,
        "Bytes at which x, ids, weights, result and hints begin, from the first half to the second, and in all.");
  m.attr("MOST_HINTED_TOKENS") = kMostHintedTokens;
}

}  // namespace tandem

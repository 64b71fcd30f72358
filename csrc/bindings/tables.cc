// Tables that are read by row: arrays in, checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/tables/row_numbers.h"
#include "runtime/tables/row_reader.h"

namespace nb = nanobind;

namespace tandem {
namespace {

constexpr int64_t kFewRows = 512;  // whose numbers are found before another thread of Python could have begun

// A step's tokens, checked. begins: null where each row is a sequence.
struct StepTokens {
  const int64_t *ids, *positions;
  const int32_t *slots, *begins;
  int64_t rows, sequences;
};

struct NumbersOfRows {
  RowNumbers numbers;
  std::vector<int64_t> found = {};  // of the last step whose rows a reader was asked for
  int64_t found_rows = 0;

  // ids, positions int64 [T], slots int32 [S], starts int32 [S + 1], which are not looked at where T = S. Sequences
  // behind the last slot that is not 0 only fill up, and are left out.
  static StepTokens tokens(nb::handle ids, nb::handle positions, nb::handle slots, nb::handle starts) {
    const TensorView id = view_of(ids, "ids", {Element::i64}, {kAnySize});
    const TensorView at = view_of(positions, "positions", {Element::i64}, {id.shape[0]});
    const TensorView slot = view_of(slots, "slots", {Element::i32}, {kAnySize});
    StepTokens step{static_cast<const int64_t*>(id.data),
                    static_cast<const int64_t*>(at.data),
                    static_cast<const int32_t*>(slot.data),
                    nullptr,
                    id.shape[0],
                    slot.shape[0]};
    if (step.sequences != step.rows)
      step.begins = static_cast<const int32_t*>(view_of(starts, "starts", {Element::i32}, {step.sequences + 1}).data);
    else
      while (step.sequences > 1 && step.slots[step.sequences - 1] == 0) --step.sequences;
    for (int64_t s = 0; s < step.sequences; ++s) {
      const int32_t* own = step.begins ? step.begins + s : nullptr;
      expect(step.slots[s] >= 0 && (!own || (own[0] >= 0 && own[0] <= own[1] && own[1] <= step.rows)),
             "row numbers: a slot or a start is none");
    }
    return step;
  }

  // Returns how many rows of `out`, [T, hashes], are written.
  int64_t write(const StepTokens& step, int64_t* out) {
    int64_t rows = 0;
    for (int64_t s = 0; s < step.sequences; ++s)
      for (int64_t t = step.begins ? step.begins[s] : s; t < (step.begins ? step.begins[s + 1] : s + 1); ++t, ++rows)
        numbers.row(step.ids[t], step.positions[t], step.slots[s], out + t * numbers.hashes());
    return rows;
  }

  int64_t find(nb::handle ids, nb::handle positions, nb::handle slots, nb::handle starts, nb::handle out) {
    const StepTokens step = tokens(ids, positions, slots, starts);
    const TensorView to = view_of(out, "out", {Element::i64}, {kAnySize, numbers.hashes()}, true);
    expect(to.shape[0] >= step.rows, "row numbers: out has too few rows");
    if (step.rows <= kFewRows) return write(step, static_cast<int64_t*>(to.data));
    const nb::gil_scoped_release unlocked;
    return write(step, static_cast<int64_t*>(to.data));
  }

  // Finding changes what is kept of slots, so a step whose rows could not be read is not found again.
  int64_t last(nb::handle out) const {
    const TensorView to = view_of(out, "out", {Element::i64}, {kAnySize, numbers.hashes()}, true);
    expect(to.shape[0] >= found_rows, "row numbers: out has too few rows");
    std::copy_n(found.data(), found_rows * numbers.hashes(), static_cast<int64_t*>(to.data));
    return found_rows;
  }

  void text(nb::handle ids, nb::handle out) const {
    const TensorView id = view_of(ids, "ids", {Element::i64}, {kAnySize});
    const int64_t rows = id.shape[0] - numbers.shape().longest + 1;
    expect(rows >= 0, "row numbers: a text is shorter than an n-gram");
    const TensorView to = view_of(out, "out", {Element::i64}, {rows, numbers.hashes()}, true);
    const nb::gil_scoped_release unlocked;
    numbers.text(static_cast<const int64_t*>(id.data), id.shape[0], static_cast<int64_t*>(to.data));
  }

  void copy(int64_t source, int64_t target) {
    expect(source >= 0 && target >= 0, "row numbers: a slot is none");
    numbers.copy(source, target);
  }
};

void make_numbers(NumbersOfRows* self, int64_t longest, int64_t heads, int64_t stop, std::vector<int64_t> multipliers,
                  std::vector<int64_t> sizes, std::vector<int64_t> offsets) {
  new (self)
      NumbersOfRows{RowNumbers({longest, heads, stop, std::move(multipliers), std::move(sizes), std::move(offsets)})};
}

struct TableReader {
  std::unique_ptr<RowReader> reader;

  // numbers int64 [n]; rows uint8, [n, row bytes] as one array of any form.
  void read(nb::handle numbers, nb::handle rows) {
    const TensorView number = view_of(numbers, "numbers", {Element::i64}, {kAnySize});
    const TensorView to = view_of(rows, "rows", {Element::byte}, {number.shape[0] * reader->row_bytes()}, true);
    const auto* which = static_cast<const int64_t*>(number.data);
    auto* out = static_cast<uint8_t*>(to.data);
    if (reader->copy_few(which, number.shape[0], out)) return;
    const nb::gil_scoped_release unlocked;
    reader->read(which, number.shape[0], out);
  }

  // Rows of a step's tokens, one token's behind the other's, to the first bytes of `out`. Returns how many tokens.
  int64_t read_step(NumbersOfRows& numbers, nb::handle ids, nb::handle positions, nb::handle slots, nb::handle starts,
                    nb::handle out) {
    const StepTokens step = NumbersOfRows::tokens(ids, positions, slots, starts);
    const TensorView to = view_of(out, "out", {Element::byte}, {kAnySize}, true);
    const int64_t hashes = numbers.numbers.hashes();
    expect(to.shape[0] >= step.rows * hashes * reader->row_bytes(), "a table's reader: out has too few bytes");
    std::vector<int64_t>& found = numbers.found;
    if (int64_t(found.size()) < step.rows * hashes) found.resize(size_t(step.rows * hashes));
    numbers.found_rows = 0;
    auto* bytes = static_cast<uint8_t*>(to.data);
    if (step.rows <= kFewRows) {
      const int64_t rows = numbers.found_rows = numbers.write(step, found.data());
      if (reader->copy_few(found.data(), rows * hashes, bytes)) return rows;
      const nb::gil_scoped_release unlocked;
      reader->read(found.data(), rows * hashes, bytes);
      return rows;
    }
    const nb::gil_scoped_release unlocked;
    const int64_t rows = numbers.found_rows = numbers.write(step, found.data());
    reader->read(found.data(), rows * hashes, bytes);
    return rows;
  }

  void read_ahead(nb::handle numbers) {
    const TensorView number = view_of(numbers, "numbers", {Element::i64}, {kAnySize});
    const nb::gil_scoped_release unlocked;
    reader->read_ahead(static_cast<const int64_t*>(number.data), number.shape[0]);
  }

  int64_t waited() const { return reader->waited(); }
  int64_t ahead() const { return reader->ahead(); }
};

void read_memory(TableReader* self, std::string name, nb::handle rows, int threads) {
  expect(threads > 0, "a table's reader needs a thread");
  const TensorView view = view_of(rows, "rows", {Element::byte}, {kAnySize, kAnySize});
  auto reader = std::make_unique<RowReader>(std::move(name), static_cast<const uint8_t*>(view.data), view.shape[0],
                                            view.shape[1], threads);
  new (self) TableReader{std::move(reader)};
}

void read_files(TableReader* self, std::string name, const std::vector<std::tuple<std::string, int>>& files,
                const std::vector<std::tuple<int64_t, int64_t, int64_t>>& ranges, int64_t row_bytes, bool direct,
                int threads) {
  expect(threads > 0 && row_bytes > 0, "a table's reader needs a thread, and rows bytes");
  std::vector<RowFiles::File> opened;
  for (const auto& [path, fd] : files) opened.push_back({path, fd});
  std::vector<RowRange> pieces;
  for (const auto& [file, begin, rows] : ranges) {
    expect(file >= 0 && file < int64_t(opened.size()) && begin >= 0 && rows >= 0, "a table's rows lie in no file");
    pieces.push_back({file, begin, rows});
  }
  auto own = std::make_unique<RowFiles>(std::move(name), std::move(opened), std::move(pieces), row_bytes, direct);
  new (self) TableReader{std::make_unique<RowReader>(std::move(own), threads)};
}

}  // namespace

void bind_tables(nb::module_& m) {
  nb::class_<NumbersOfRows>(m, "RowNumbers", "Numbers of a table's rows that n-grams of tokens name.")
      .def("__init__", &make_numbers, nb::arg("longest"), nb::arg("heads"), nb::arg("stop"), nb::arg("multipliers"),
           nb::arg("sizes"), nb::arg("offsets"))
      .def("find", &NumbersOfRows::find, nb::arg("ids"), nb::arg("positions"), nb::arg("slots"), nb::arg("starts"),
           nb::arg("out"), "Numbers of a step's tokens; returns how many rows are written.")
      .def("last", &NumbersOfRows::last, nb::arg("out"),
           "Numbers of the last step whose rows a reader was asked for; returns how many rows are written.")
      .def("text", &NumbersOfRows::text, nb::arg("ids"), nb::arg("out"),
           "Numbers of a text's tokens, but of those that only begin n-grams.")
      .def("copy", &NumbersOfRows::copy, nb::arg("source"), nb::arg("target"), "A slot becomes another's copy.");
  nb::class_<TableReader>(m, "RowReader", "Rows of a table by their numbers.")
      .def("__init__", &read_memory, nb::arg("name"), nb::arg("rows"), nb::arg("threads"), nb::keep_alive<1, 3>(),
           "Rows in memory.")
      .def("__init__", &read_files, nb::arg("name"), nb::arg("files"), nb::arg("ranges"), nb::arg("row_bytes"),
           nb::arg("direct"), nb::arg("threads"),
           "files: path and open descriptor, which stays the caller's; ranges: file, first byte, rows.")
      .def("read", &TableReader::read, nb::arg("numbers"), nb::arg("rows"))
      .def("read_step", &TableReader::read_step, nb::arg("numbers"), nb::arg("ids"), nb::arg("positions"),
           nb::arg("slots"), nb::arg("starts"), nb::arg("out"), "Rows of a step's tokens; returns of how many.")
      .def("read_ahead", &TableReader::read_ahead, nb::arg("numbers"), "These rows will be needed soon.")
      .def_prop_ro("waited", &TableReader::waited, "Rows that a read had to wait for, since the start.")
      .def_prop_ro("ahead", &TableReader::ahead, "Rows that were read before anybody needed them, since the start.");
}

}  // namespace tandem

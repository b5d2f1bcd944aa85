// Flash-decoding: the few queries of a sequence, all heads of one KV head together, against chunks of its cache.
#pragma once

#include "attend/attend_softmax.h"

namespace infer_native {
namespace {

// sums[r][0..] = q[r] · keys, of GROUPS groups of 16 tokens; q is [dim / DEPTH][ROWS].
template <Number T, int ROWS, int GROUPS>
inline void score(const uint8_t* keys, const uint8_t* next, int64_t dim, const typename Products<T>::Factor* q, float* sums) {
  using Sum = typename Products<T>::Sum;
  constexpr int VECTORS = GROUPS * GROUP_VECTORS;
  constexpr int64_t STEP = KEY_GROUP * SIZE<T> * DEPTH<T>;
  Sum acc[ROWS][VECTORS];
  unroll<ROWS>([&](auto r) { unroll<VECTORS>([&](auto v) { acc[r][v] = Sum{}; }); });
  const int64_t group_bytes = dim * KEY_GROUP * SIZE<T>;
  for (int64_t d = 0; d < dim; d += DEPTH<T>, keys += STEP, next += GROUPS * STEP, q += ROWS) {
    Sum key[VECTORS];
    unroll<(GROUPS * STEP + 63) / 64>([&](auto line) { __builtin_prefetch(next + 64 * line); });
    unroll<VECTORS>([&](auto v) {
      constexpr int group = v / GROUP_VECTORS, part = v % GROUP_VECTORS;
      key[v] = Products<T>::load(keys + group * group_bytes + part * LANES * SIZE<T> * DEPTH<T>);
    });
    unroll<ROWS>([&](auto r) {
      unroll<VECTORS>([&](auto v) { acc[r][v] = Products<T>::add(acc[r][v], key[v], q[r]); });
    });
  }
  unroll<ROWS>([&](auto r) {
    unroll<VECTORS>([&](auto v) { std::memcpy(sums + r * CHUNK + v * LANES, &acc[r][v], sizeof(Sum)); });
  });
}

// sums[r][0..VECTORS) += weights[r][t] * values[t], of `count` times DEPTH tokens.
template <Number T, int ROWS, int VECTORS>
inline void weigh(const uint8_t* values, const uint8_t* next, int64_t count, int64_t row_bytes,
                  const typename Products<T>::Factor* weights, float* sums, int64_t sum_stride) {
  using Sum = typename Products<T>::Sum;
  constexpr int64_t STEP = LANES * SIZE<T> * DEPTH<T>;
  Sum acc[ROWS][VECTORS];
  unroll<ROWS>([&](auto r) {
    unroll<VECTORS>([&](auto v) { acc[r][v] = load_as<Sum>(sums + r * sum_stride + v * LANES); });
  });
  for (int64_t t = 0; t < count; ++t, values += row_bytes, next += row_bytes) {
    Sum value[VECTORS];
    unroll<(VECTORS * STEP + 63) / 64>([&](auto line) { __builtin_prefetch(next + 64 * line); });
    unroll<VECTORS>([&](auto v) { value[v] = Products<T>::load(values + v * STEP); });
    unroll<ROWS>([&](auto r) {
      unroll<VECTORS>([&](auto v) { acc[r][v] = Products<T>::add(acc[r][v], value[v], weights[r * CHUNK + t]); });
    });
  }
  unroll<ROWS>([&](auto r) {
    unroll<VECTORS>([&](auto v) { std::memcpy(sums + r * sum_stride + v * LANES, &acc[r][v], sizeof(Sum)); });
  });
}

// The CPU's own prefetcher follows a stream when it has seen a few of its lines.
inline void start_stream(const uint8_t* p) {
  for (int line = 0; line < 3; ++line) __builtin_prefetch(p + 64 * line);
}

// Registers of values for a number of rows, so that sums stay in registers.
constexpr int width_for(int rows) {
  int width = 8;
  while (width > 1 && rows * width > Lane::SUMS) width /= 2;
  return width;
}

// Sums all columns; where the row is no multiple of a register, the last register overlaps the one before, with sums of its own.
template <Number T, int ROWS, int WIDTH = width_for(ROWS)>
inline void weigh_columns(const uint8_t* values, const uint8_t* next, int64_t count, int64_t dim,
                          const typename Products<T>::Factor* weights, float* sums, int64_t sum_stride, int64_t from = 0) {
  constexpr int64_t NUMBER = SIZE<T> * DEPTH<T>;
  const int64_t row_bytes = dim * NUMBER, whole = dim / LANES;
  int64_t v = from;
  for (; v + WIDTH <= whole; v += WIDTH)
    weigh<T, ROWS, WIDTH>(values + v * LANES * NUMBER, next + v * LANES * NUMBER, count, row_bytes, weights,
                          sums + v * LANES, sum_stride);
  if constexpr (WIDTH > 1) {
    if (v * LANES < dim) weigh_columns<T, ROWS, WIDTH / 2>(values, next, count, dim, weights, sums, sum_stride, v);
  } else if (v * LANES < dim) {
    const int64_t start = (dim - LANES) * NUMBER;
    weigh<T, ROWS, 1>(values + start, next + start, count, row_bytes, weights, sums + v * LANES, sum_stride);
  }
}

// A softmax over some of the tokens: largest logit and sum of exponentials [rows], weighted values [rows][padded].
struct Partial {
  float *most, *total, *sums;

  Partial(float* memory, int64_t rows) : most(memory), total(memory + rows), sums(memory + 2 * rows) {}
};

// The rows of one piece, in parts of nearly equal height that fit the registers.
struct Decoder {
  const AttendArgs& args;
  const Span span;
  const int64_t sequence, head, group, rows, parts, dim, padded;
  // q by parts [dim][height], of INT8 [dim / 2][height] pairs of int16 with a step for each row; logits [rows][CHUNK],
  // which become weights, of INT8 pairs of int16; room for two partials
  float *q, *steps, *logits, *memory;
  Segment segments[MAX_SEGMENTS];
  int64_t count = 0;

  Decoder(const AttendArgs& given, const Piece& piece)
      : args(given), span(given, piece.sequence), sequence(piece.sequence), head(piece.head), group(group_size(given)),
        rows(span.count * group), parts((rows + Lane::ROWS - 1) / Lane::ROWS), dim(given.head_dim),
        padded(padded_dim(given)) {
    const int64_t floats = (rows + 1) * padded + rows + rows * CHUNK + 2 * partial_floats(args, rows);
    q = static_cast<float*>(attend_workspace(floats * static_cast<int64_t>(sizeof(float)) + 64));
    steps = q + (rows + 1) * padded;
    logits = steps + rows;
    memory = logits + rows * CHUNK;
  }

  int64_t start(int64_t part) const { return rows * part / parts; }
  int64_t token_of(int64_t row) const { return row / group; }
  int64_t head_of(int64_t row) const { return head * group + row % group; }

  void read_queries() {
    float* const row_of = q + rows * padded;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = start(part), height = start(part + 1) - first;
      for (int64_t r = 0; r < height; ++r) {
        const int64_t token = span.first + token_of(first + r);
        read_row(args.query, args.type, token, head_of(first + r), dim, row_of);
        rotate(args, token, row_of);
        if (args.cache_type == Number::INT8) {
          steps[first + r] = to_whole(row_of, dim, most_whole(dim)) * args.scale;
          put_pairs(row_of, q + first * (dim / 2) + r, height);
          continue;
        }
        for (int64_t d = 0; d < dim; ++d) q[first * dim + d * height + r] = row_of[d] * args.scale;
      }
    }
  }

  // Writes the rounded row as pairs of int16, every `stride` floats; overwrites the row.
  void put_pairs(float* row, float* pairs, int64_t stride) const {
    auto* const narrow = reinterpret_cast<uint8_t*>(row);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      const Shorts numbers = __builtin_convertvector(__builtin_convertvector(load(row + d), Ints), Shorts);
      std::memcpy(narrow + 2 * d, &numbers, sizeof numbers);
    }
    for (; d < dim; ++d) {
      const auto number = static_cast<int16_t>(row[d]);
      std::memcpy(narrow + 2 * d, &number, sizeof number);
    }
    for (d = 0; d < dim; d += 2) std::memcpy(pairs + d / 2 * stride, narrow + 2 * d, 4);
  }

  PageHead page_at(int64_t block) const {
    return PageHead(args, args.block_table[sequence * args.blocks + block], head);
  }

  // The pages of places low..high, of which `origin` is logit 0.
  void find(int64_t low, int64_t high, int64_t origin) {
    count = 0;
    int64_t block = low / args.page, place = low - block * args.page;
    for (; low < high; ++block, place = 0) {
      const int64_t left = args.page - place, number = left < high - low ? left : high - low;
      segments[count++] = Segment{page_at(block), place, low - origin, number};
      low += number;
    }
  }

  // each(height as a constant, first row) for every part.
  template <class Each>
  void by_parts(Each each) const {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = start(part);
      with_height<Lane::ROWS>(static_cast<int>(start(part + 1) - first), [&](auto height) { each(height, first); });
    }
  }

  template <Number T, int ROWS>
  void score_segment(const Segment& segment, const uint8_t* next, int64_t first, float* out) const {
    const auto* const queries = reinterpret_cast<const typename Products<T>::Factor*>(q) + first * (dim / DEPTH<T>);
    const int64_t step = KEY_GROUP * dim * SIZE<T>;
    const uint8_t* keys = segment.page.keys + segment.place * dim * SIZE<T>;
    int64_t t = 0;
    for (; t + (Lane::GROUPS - 1) * KEY_GROUP < segment.count; t += Lane::GROUPS * KEY_GROUP) {
      score<T, ROWS, Lane::GROUPS>(keys, next, dim, queries, out + segment.offset + t);
      keys += Lane::GROUPS * step, next += Lane::GROUPS * step;
    }
    for (; t < segment.count; t += KEY_GROUP, keys += step, next += step)
      score<T, ROWS, 1>(keys, next, dim, queries, out + segment.offset + t);
  }

  template <Number T>
  void chunk(int64_t index, Partial into) {
    const int64_t origin = index * CHUNK, limit = origin + CHUNK;
    const int64_t low = (span.low > origin ? span.low : origin) / KEY_GROUP * KEY_GROUP;
    const int64_t high = span.high < limit ? span.high : limit;
    find(low, high, origin);
    for (int64_t i = 0; i < count; ++i) {
      if (T == Number::INT8) prefetch_steps(segments[i]);
      if (i + 2 < count) start_stream(segments[i + 2].page.keys);
      const uint8_t* const next = i + 1 < count ? segments[i + 1].page.keys : segments[0].page.values;
      by_parts([&](auto height, int64_t first) {
        this->template score_segment<T, decltype(height)::value>(segments[i], next, first, logits + first * CHUNK);
      });
    }
    const int64_t begin = low - origin, end = (high - origin + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
    float weight_steps[FEW_ROWS];
    const uint8_t* ahead = segments[count > 1].page.values;
    for (int64_t r = 0; r < rows; ++r, ahead += 4 * (end - begin)) {
      float* const row = logits + r * CHUNK;
      const Seen seen(args, span, token_of(r));
      const bool all_seen = args.softcap == 0 && args.slopes == nullptr && args.bias == nullptr && seen.low <= low && seen.high >= origin + end;
      if (T == Number::INT8) into.most[r] = scale_row(segments, count, steps[r], row);
      if (T != Number::INT8 || !all_seen) into.most[r] = finish_logits(args, head_of(r), row, begin, end, seen, origin);
      const float shift = into.most[r] == NONE ? 0 : into.most[r];
      if (T == Number::INT8) {
        const RowWeights found = weigh_row(segments, count, shift, row, ahead);
        into.total[r] = found.total, weight_steps[r] = found.step;
      } else {
        into.total[r] = reduce_add(exponentials(row, begin, end, shift, ahead));
      }
    }
    std::memset(into.sums, 0, static_cast<size_t>(rows * padded) * sizeof(float));
    const uint8_t* const after = high < span.high ? page_at(high / args.page).keys : segments[0].page.values;
    for (int64_t i = 0; i < count; ++i) {
      const Segment& segment = segments[i];
      const uint8_t* const next = i + 1 < count ? segments[i + 1].page.values : after;
      if (i + 2 < count) start_stream(segments[i + 2].page.values);
      by_parts([&](auto height, int64_t first) {
        const auto* const weights = reinterpret_cast<const typename Products<T>::Factor*>(logits + first * CHUNK);
        weigh_columns<T, decltype(height)::value>(segment.page.values + segment.place * dim * SIZE<T>, next,
                                                  (segment.count + DEPTH<T> - 1) / DEPTH<T>, dim,
                                                  weights + segment.offset / DEPTH<T>, into.sums + first * padded, padded);
      });
    }
    if (T != Number::INT8) return;
    for (int64_t r = 0; r < rows; ++r)
      for (float* at = into.sums + r * padded; at < into.sums + (r + 1) * padded; at += LANES)
        store(at, __builtin_convertvector(load_as<Ints>(at), Floats) * broadcast(weight_steps[r]));
  }

  void finish(Partial result) const {
    for (int64_t r = 0; r < rows; ++r) {
      float* const row = result.sums + r * padded;
      const int64_t whole = dim / LANES * LANES;  // the overlapping last register goes where its columns belong
      if (whole < dim) store(row + dim - LANES, load(row + whole));
      write_result(args, span.first + token_of(r), head_of(r), result.most[r], result.total[r], row);
    }
  }

  // into += other, row by row; those that saw nothing have NONE.
  void join(Partial into, Partial other) const {
    for (int64_t r = 0; r < rows; ++r) {
      const float top = into.most[r] > other.most[r] ? into.most[r] : other.most[r];
      if (other.most[r] == NONE && other.total[r] == 0) continue;
      const float keep = into.most[r] == NONE ? 0 : exponential(into.most[r] - top);
      const float take = exponential(other.most[r] - top);
      into.total[r] = into.total[r] * keep + other.total[r] * take;
      float *sums = into.sums + r * padded, *more = other.sums + r * padded;
      for (int64_t i = 0; i < padded; i += LANES)
        store(sums + i, Lane::fma(load(more + i), broadcast(take), load(sums + i) * broadcast(keep)));
      into.most[r] = top;
    }
  }
};

inline bool decodes(const AttendArgs& args) { return grouped(args) && args.head_dim >= LANES; }

inline void decode(const AttendArgs& args, const Piece& piece, float* partials) {
  Decoder decoder(args, piece);
  decoder.read_queries();
  const int64_t size = partial_floats(args, decoder.rows);
  const Partial running(decoder.memory, decoder.rows), next(decoder.memory + size, decoder.rows);
  with_type(args.cache_type, [&](auto kind) {
    for (int64_t c = piece.begin; c < piece.end; ++c) {
      const Partial into = partials ? Partial(partials + (c - piece.begin) * size, decoder.rows)
                                    : c == piece.begin ? running : next;
      decoder.template chunk<decltype(kind)::value>(c, into);
      if (!partials && c > piece.begin) decoder.join(running, next);
    }
  });
  if (partials) return;
  if (piece.begin == piece.end) {  // no tokens at all
    std::memset(decoder.memory, 0, static_cast<size_t>(size) * sizeof(float));
    for (int64_t r = 0; r < decoder.rows; ++r) running.most[r] = NONE;
  }
  decoder.finish(running);
}

inline void merge(const AttendArgs& args, const Piece& piece, const float* partials) {
  const Decoder decoder(args, piece);
  const int64_t size = partial_floats(args, decoder.rows), chunks = decoder.span.chunks();
  std::memcpy(decoder.memory, partials, static_cast<size_t>(size) * sizeof(float));
  const Partial running(decoder.memory, decoder.rows);
  for (int64_t c = 1; c < chunks; ++c) decoder.join(running, Partial(const_cast<float*>(partials) + c * size, decoder.rows));
  decoder.finish(running);
}

}  // namespace
}  // namespace infer_native

// A forward pass as a list of instructions, run by a pool of threads.
//
// An instruction reads and writes buffers: a number of floats per token of the step. Threads take its
// items (tokens, column blocks, queries) as they come; the next begins when all are done. Instructions that work
// token by token and follow each other are one phase: a token goes through all of them on one thread.
#pragma once
#include <sys/mman.h>

#include "attention_tiles.h"
#include "linear.h"
#include "matrix.h"
#include "media.h"
#include "pool.h"
#include "select.h"

enum Op : int32_t {
    EMBEDDING, RMS_NORM, ADD_RMS_NORM, QUANTIZE, LINEAR, ROPE_ANGLES, ROPE, KV_WRITE, ATTENTION, SILU_MUL, TAKE, LARGEST,
    ROPE_AXES, REPLACE_ROWS, ADD_ROWS, LINEAR_LARGEST, LARGEST_PAIR
};

struct View {  // columns [at, at + width) of a buffer; buffer -1 is the step's output, and has the view's width
    int32_t buffer, at, width;
};

struct Instruction {
    int32_t op;
    View x, y, z;        // what is read, what is written, and what the op says
    int32_t quantized;   // number of the quantized buffer that y goes to as well, or -1
    int32_t layer, heads, window;  // layer: of media, the part
    float number;        // epsilon, or scale
    const void* weight;  // const Weight*, or floats
};

struct Buffer {
    int32_t width;      // floats per token
    int32_t inputs;     // Inputs: floats, or what they are rounded to
};

struct Step {
    int32_t tokens, rows, table_width;
    const int64_t* ids;        // [tokens]
    const int64_t* positions;  // [tokens]
    const int64_t* slots;      // [tokens]; -1: KV is not written
    const int32_t* row_starts; // [rows + 1]
    const int32_t* contexts;   // [rows]
    const int32_t* blocks;     // [rows, table_width]
    void* cache;               // [layers, blocks, heads, 2, ...]
    int64_t cache_layer;       // numbers from a layer to the next
    int32_t block_size, kv_heads, head_size;
    const float* input;        // [tokens, width] of buffer 0, where a program begins with floats
    float* output;             // [tokens, width of the last value]
    Media media;
    const int32_t* prompts;    // [rows]: how many tokens of a row, its first ones here, are of its prompt; null: none
};

constexpr int FEW = 64;                       // tokens of a step whose time is that of reading weights, in part
constexpr size_t FETCHED = size_t(256) << 10; // bytes of the next weight that waiting threads fetch: they fit the second cache

static void* pages(size_t bytes) {
    constexpr size_t huge = size_t(2) << 20;
    bytes = (bytes + huge - 1) / huge * huge;
    void* at = nullptr;
    if (posix_memalign(&at, huge, bytes)) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(at, bytes, MADV_HUGEPAGE);  // half the time of a small step is spent on weights: fewer pages, faster
#endif
    return at;
}

class Program {
  public:
    Program(const Instruction* list, int count, const Buffer* buffers, int num_buffers, int cache_kind)
        : list_(list, list + count), buffers_(buffers, buffers + num_buffers), cache_kind_(cache_kind) {
        memory_.resize(buffers_.size());
        quantized_.resize(buffers_.size());
        for (const Buffer& b : buffers_) strides_.push_back(((b.width * 4 + LINE - 1) / LINE | 1) * (LINE / 4));
        for (const Instruction& each : list_) {
            if (is_product(each) && each.x.buffer >= 0) strides_[each.x.buffer] = buffers_[each.x.buffer].width;
            if (each.op == ATTENTION) {
                attention_ = &each;
                if (!plan(each.window)) plans_.emplace_back(), plans_.back().window = each.window;
            }
        }
        for (size_t at = 0; at + 1 < list_.size(); at++) {
            const Instruction &product = list_[at], &gate = list_[at + 1];
            const bool follows = product.op == LINEAR && gate.op == SILU_MUL && gate.x.buffer == product.y.buffer && gate.quantized >= 0;
            const bool prompts = follows && product.x.buffer >= 0 && buffers_[product.x.buffer].inputs == MIXED && buffers_[gate.quantized].inputs == MIXED;
            gates_.push_back(prompts && can_be_gated(*(const Weight*)product.weight) ? gate.quantized : -1);
        }
        gates_.push_back(-1);
        group(false);
    }
    Program(const Program&) = delete;
    ~Program() {
        std::free(block_);
    }

    // 0, or -1 where there is no memory, -2 where a shape is not served (see `serves`).
    int run(Pool& pool, const Step& step) {
        if (phases_.size() > Pool::MOST_PHASES) return -2;
        if (attention_ && !serves(step.head_size)) return -2;
        if (step.tokens > capacity_ && !grow(step.tokens)) return -1;
        step_ = step;
        tokens_ = step.tokens > 16 * pool.threads() ? 4 : 1;
        for (Plan& plan : plans_) {
            const Rows rows = {step.rows, step.table_width, step.row_starts, step.contexts, step.blocks};
            plan.make(rows, step.block_size, step.kv_heads, attention_->heads / step.kv_heads, step.head_size, pool.threads());
        }
        cut();
        prepare(pool.threads());
        while (int(scratch_.size()) < pool.threads()) scratch_.emplace_back(new Scratch);
        times_.resize(profiled_ ? phases_.size() : 0);
        number_++;
        const auto work = [this](uint32_t phase, uint32_t item, int thread) {
            Scratch& scratch = *scratch_[thread];
            if (scratch.shaped != number_) shape_tiles(), scratch.shaped = number_;
            execute(phase, item, scratch);
        };
        pool.run(run_, work, profiled_ ? times_.data() : nullptr);
        for (size_t p = 0; p < times_.size(); p++) spent_[p] += times_[p];
        return 0;
    }

    // Times are taken from now on, or no more. Every instruction is a phase of its own then.
    void profile(bool on) {
        profiled_ = on;
        group(on);
        spent_.assign(list_.size(), 0.0);
    }
    // Seconds of every instruction since `profile`.
    void spent(double* seconds) const { std::copy(spent_.begin(), spent_.end(), seconds); }

    static bool serves(int head_size) { return head_size % 16 == 0 && head_size <= MOST_HEAD; }

  private:
    struct Phase {
        int first, end;  // instructions
    };

    static bool is_product(const Instruction& i) { return i.op == LINEAR || i.op == LINEAR_LARGEST; }
    static bool by_token(const Instruction& i) { return !is_product(i) && i.op != ATTENTION; }

    void group(bool alone) {
        phases_.clear();
        for (int at = 0; at < int(list_.size()); at++) {
            const bool joins = !alone && at > 0 && by_token(list_[at]) && by_token(list_[at - 1]);
            if (joins) phases_.back().end++;
            else phases_.push_back({at, at + 1});
        }
    }

    size_t bytes_of_token(size_t buffer) const {
        const Buffer& b = buffers_[buffer];
        if (b.inputs == FLOATS) return 4 * strides_[buffer];
        const size_t bytes = 2 * b.width + b.width / 4 + 8, shorts = 2 * shorts_of_row(Inputs(b.inputs), b.width);
        return b.inputs == SPLIT ? shorts : b.inputs == MIXED ? bytes + shorts : bytes;
    }

    bool grow(int tokens) {
        tokens = (std::max(tokens, 2 * capacity_) + SIDE - 1) / SIDE * SIDE;  // a tile reads all its rows
        capacity_ = 0;
        std::vector<size_t> starts;
        size_t total = 0;
        for (const Buffer& b : buffers_) {
            const size_t bytes = size_t(tokens) * bytes_of_token(starts.size());
            starts.push_back(total);
            total += (bytes + 256 + 63) / 64 * 64;
        }
        std::free(block_);
        block_ = (char*)pages(total);
        if (!block_) return false;
        for (size_t at = 0; at < buffers_.size(); at++) {
            memory_[at] = quantized_[at].q = block_ + starts[at];
            quantized_[at].scale = (float*)(block_ + starts[at] + size_t(tokens) * 2 * buffers_[at].width);
            quantized_[at].unit = quantized_[at].scale + size_t(tokens) * (buffers_[at].width / GROUP * 2);
            const bool split = buffers_[at].inputs == SPLIT;  // that has no bytes; tiles begin with a cache line
            quantized_[at].shorts = (uint16_t*)(split ? memory_[at] : quantized_[at].unit + (tokens + 15) / 16 * 16);
        }
        capacity_ = tokens;
        return true;
    }

    Plan* plan(int window) {
        for (Plan& each : plans_)
            if (each.window == window) return &each;
        return nullptr;
    }

    // How many items there are, and what is fetched meanwhile: each product's weights by the one before it.
    void prepare(int threads) {
        run_.resize(phases_.size());
        later_.resize(phases_.size());
        const auto first = std::find_if(list_.begin(), list_.end(), is_product);
        const Weight* next = first == list_.end() ? nullptr : (const Weight*)first->weight;  // of the next step
        for (size_t p = phases_.size(); p-- > 0;) {
            const Instruction& i = list_[phases_[p].first];
            const size_t bytes = next ? next->bytes() : 0;
            const Weight* weight = is_product(i) ? (const Weight*)i.weight : nullptr;
            const int64_t count = items(phases_[p]), lead = weight && step_.tokens <= FEW ? threads * COLUMN_BLOCKS : 0;
            later_[p] = {lead, next ? next->data : nullptr, bytes};
            run_[p] = {uint32_t(count), weight ? 1u : UINT32_MAX, {}};
            if (next && step_.tokens <= FEW) run_[p].fetched = {next->data, std::min(bytes, FETCHED)};
            if (weight) next = weight;
        }
    }

    // Tokens of prompts, and others.
    void cut() {
        rows_.clear(), mixed_.clear(), kinds_.clear();
        cut_rows(0, step_.tokens, false, rows_);
        if (!step_.prompts) return;
        kinds_.assign(step_.tokens, 0);
        for (int row = 0; row < step_.rows; row++)
            std::fill_n(kinds_.begin() + step_.row_starts[row], step_.prompts[row], 1);
        for (int token = 0, next; token < step_.tokens; token = next) {
            for (next = token + 1; next < step_.tokens && kinds_[next] == kinds_[token];) next++;
            cut_rows(token, next, kinds_[token], mixed_);
        }
    }
    bool of_prompt(int64_t token) const { return !kinds_.empty() && kinds_[token]; }
    const std::vector<RowsOfItem>& rows_of(const Instruction& product) const {
        return step_.prompts && product.x.buffer >= 0 && buffers_[product.x.buffer].inputs == MIXED ? mixed_ : rows_;
    }

    int64_t items(const Phase& phase) {
        const Instruction& i = list_[phase.first];
        if (is_product(i)) return linear_items(*(const Weight*)i.weight, rows_of(i));
        if (i.op == ATTENTION) return int64_t(plan(i.window)->tiles.size());
        return (step_.tokens + tokens_ - 1) / tokens_;
    }

    int64_t stride(const View& view) const { return view.buffer < 0 ? view.width : strides_[view.buffer]; }
    float* at(const View& view, int64_t token) const {
        float* from = view.buffer < 0 ? step_.output : (float*)memory_[view.buffer];
        return from + token * stride(view) + view.at;
    }

    void execute(uint32_t number, uint32_t item, Scratch& scratch) {
        const Phase& phase = phases_[number];
        const Instruction& i = list_[phase.first];
        if (is_product(i)) {
            const void* x = buffers_[i.x.buffer].inputs != FLOATS ? (const void*)&quantized_[i.x.buffer] : at(i.x, 0);
            const Weight& weight = *(const Weight*)i.weight;
            const LinearItem part = item_of(weight, rows_of(i), item);
            if (part.prompt && gates_[phase.first] >= 0)
                return linear_gated(weight, *(const Quantized*)x, part, quantized_[gates_[phase.first]].shorts);
            if (i.op == LINEAR) return linear(weight, x, part, at(i.y, 0), stride(i.y), later_[number]);
            return linear_largest(weight, x, part, at(i.y, 0), stride(i.y), later_[number]);
        }
        if (i.op == ATTENTION) {
#if MATRIX
            if (cache_kind_ == PAIRED) return attend<Bfloat>(i, item, scratch);
#endif
            if (cache_kind_ == WHOLE) return attend<float>(i, item, scratch);
            return cache_kind_ == HALVES ? attend<uint16_t>(i, item, scratch) : attend<int8_t>(i, item, scratch);
        }
        const int64_t end = std::min<int64_t>(step_.tokens, int64_t(item + 1) * tokens_);
        for (int64_t token = int64_t(item) * tokens_; token < end; token++)
            for (int at = phase.first; at < phase.end; at++)
                if (at == 0 || gates_[at - 1] < 0 || !of_prompt(token)) one_token(list_[at], token);  // else it is done
    }

    template <class T>
    void attend(const Instruction& i, uint32_t item, Scratch& scratch) {
        const Cache<T> layer = cache<T>(i.layer);
        Plan& plan = *this->plan(i.window);
        const Tile* tile = &plan.tiles[item];
        Attention<T> attention(layer, plan, *tile, item > 0 ? tile - 1 : nullptr, scratch);
        attention.run(at(i.x, 0), stride(i.x), i.number, at(i.y, 0), stride(i.y), i.heads / step_.kv_heads);
    }

    void one_token(const Instruction& i, int64_t token) {
        const float* weight = (const float*)i.weight;
        const int width = i.x.width / i.heads;
        switch (i.op) {
            case TAKE: std::memcpy(at(i.y, token), step_.input + token * i.y.width, sizeof(float) * i.y.width); break;
            case EMBEDDING: unpack_row(*(const Weight*)i.weight, step_.ids[token], at(i.y, token)); break;
            case ADD_RMS_NORM:
                rms_norm_row(at(i.z, token), at(i.x, token), weight, i.x.width, i.number, at(i.y, token));
                break;
            case RMS_NORM:
                for (int h = 0; h < i.heads; h++)
                    rms_norm_row(at(i.x, token) + h * width, nullptr, weight, width, i.number, at(i.y, token) + h * width);
                break;
            case SILU_MUL: silu_mul_row(at(i.x, token), i.y.width, at(i.y, token)); break;
            case ROPE_ANGLES: rope_angles(step_.positions[token], weight, i.number, i.y.width / 2, at(i.y, token)); break;
            case ROPE:
                for (int h = 0; h < i.heads; h++)
                    rope_head(at(i.x, token) + h * width, at(i.z, token), at(i.z, token) + width / 2, width / 2);
                break;
            case ROPE_AXES:
                step_.media.rope_angles(token, step_.tokens, step_.positions[token], weight, i.number, i.y.width / 2, at(i.y, token));
                break;
            case REPLACE_ROWS: step_.media.replace(token, i.layer, i.y.width, at(i.y, token)); break;
            case ADD_ROWS: step_.media.add(token, i.layer, i.y.width, at(i.y, token)); break;
            case KV_WRITE:
                if (cache_kind_ == WHOLE) write<float>(i, token);
                else if (cache_kind_ == HALVES) write<uint16_t>(i, token);
#if MATRIX
                else if (cache_kind_ == PAIRED) write<Bfloat>(i, token);
#endif
                else write<int8_t>(i, token);
                break;
            case LARGEST: put_largest(largest_of_row(at(i.x, token), i.x.width), at(i.y, token)); break;
            case LARGEST_PAIR: {
                const Largest* pairs = (const Largest*)at(i.x, token);
                const auto less = [](const Largest& a, const Largest& b) { return a.key < b.key; };
                put_largest(*std::max_element(pairs, pairs + i.x.width / 2, less), at(i.y, token));
                break;
            }
        }
        if (i.quantized >= 0) quantize(i, token);
    }

    // Its number in the bits of to[0], its value in to[1].
    static void put_largest(Largest largest, float* to) {
        std::memcpy(to, &largest.id, 4);
        to[1] = value_of(largest.key);
    }

    template <class T>
    void write(const Instruction& i, int64_t token) {
        const int64_t slot = step_.slots[token];
        if (slot < 0) return;
        const Cache<T> layer = cache<T>(i.layer);
        for (int head = 0; head < step_.kv_heads; head++)
            write_kv(layer, slot, head, at(i.x, token) + head * step_.head_size, at(i.z, token) + head * step_.head_size);
    }

    void quantize(const Instruction& i, int64_t token) {
        const Quantized& to = quantized_[i.quantized];
        const int width = buffers_[i.quantized].width;
        const float* from = at(i.op == QUANTIZE ? i.x : i.y, token);
        const Inputs inputs = Inputs(buffers_[i.quantized].inputs);
        if (inputs == SPLIT || (inputs == MIXED && of_prompt(token))) quantize_shorts(from, width, inputs == SPLIT, to.shorts, token);
        else if (inputs != WORDS)
            quantize_bytes(from, width, (int8_t*)to.q + token * width, to.scale + token * (width / GROUP) * 2, to.unit + token);
        else quantize_words(from, width, (int16_t*)to.q + token * width, to.scale + token);
    }

    template <class T>
    Cache<T> cache(int layer) const {
        T* keys = (T*)step_.cache + layer * step_.cache_layer;
        const int P = step_.block_size, K = step_.kv_heads, A = step_.head_size;
        return {keys, keys + int64_t(K) * P * (A + Cache<T>::SCALE), P, P % UNIT ? 1 : UNIT, K, A};
    }

    const std::vector<Instruction> list_;
    const std::vector<Buffer> buffers_;
    const int cache_kind_;
    const Instruction* attention_ = nullptr;
    bool profiled_ = false;
    int capacity_ = 0, tokens_ = 1;  // tokens_: of one item
    uint64_t number_ = 0;            // of runs
    Step step_{};
    std::vector<Phase> phases_;
    char* block_ = nullptr;  // all buffers
    std::vector<void*> memory_;
    // Floats from a token to the next: an odd number of lines, so that tokens lie in all sets of the caches. A product of
    // 16 rows with 3,072 outputs took up to twice as long where they lay in one. What a product reads has no gaps.
    std::vector<int64_t> strides_;
    std::vector<Quantized> quantized_;
    std::vector<RowsOfItem> rows_, mixed_;  // of products: all tokens alike; tokens of prompts and others apart
    std::vector<uint8_t> kinds_;            // of a step with prompts: 1 for their tokens
    std::vector<int32_t> gates_;            // of each instruction: where a product of prompts puts what the gate behind it makes of it, or -1
    std::vector<Plan> plans_;  // of attention, by window
    std::vector<PhaseOfPool> run_;
    std::vector<Later> later_;
    std::vector<double> times_, spent_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
};

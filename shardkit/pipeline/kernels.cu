// What the GPU does with decoded images, and what it looks at before: compiled by NVRTC for the GPU at hand, and by a
// C++ compiler for tests. No header is included, because NVRTC brings none.

typedef unsigned char u8;
typedef unsigned long long u64;

// As `IMAGE` in kernels.py.
struct Image {
    u64 source, target;
    int pitch, width, height, orientation;
    int x, y, w, h;
    int out_width, out_height, cut_x, cut_y;
    int target_width, target_height;
    int mirror, row;
};

// As `PAYLOAD` in kernels.py.
struct Payload {
    u64 address, size;
    int width, height, components, sof;
};

struct Colours {
    float mean[3], scale[3];
};

enum Type { UINT8, FLOAT16, FLOAT32 };

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
DEVICE unsigned short to_half(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
DEVICE unsigned from_byte(unsigned low, unsigned high, int byte) { return __funnelshift_r(low, high, 8 * byte); }
#else  // tests: the same loops, one call a thread
#define DEVICE static inline
#define KERNEL extern "C" void
#define __restrict__
struct Dim { int x, y, z; };
static thread_local Dim blockIdx, blockDim, threadIdx;
static unsigned from_byte(unsigned low, unsigned high, int byte) {
    return (unsigned)(((u64)high << 32 | low) >> (8 * byte));
}
static float rintf(float value) { return __builtin_rintf(value); }
DEVICE unsigned short to_half(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
}
#endif

// Where the pixels that a viewer sees lie: the one at (x, y) is at origin + x * along_x + y * along_y.
struct View {
    const u8* origin;
    long long along_x, along_y;
};

DEVICE View shown(const Image& image) {
    const long long right = 3, down = image.pitch;
    const u8* first = (const u8*)image.source;
    const u8* last_column = first + (image.width - 1) * right;
    const u8* last_row = first + (image.height - 1) * down;
    const u8* last = last_row + (image.width - 1) * right;
    switch (image.orientation) {
        case 2: return {last_column, -right, down};
        case 3: return {last, -right, -down};
        case 4: return {last_row, right, -down};
        case 5: return {first, down, right};
        case 6: return {last_row, -down, right};
        case 7: return {last, -down, -right};
        case 8: return {last_column, down, -right};
        default: return {first, right, down};
    }
}

// The pixels of one axis that an output pixel is made of, weighted by a triangle: Pillow's BILINEAR with antialiasing.
struct Taps {
    int first, end;
    float centre, sharpness;
};

DEVICE Taps taps(int at, int in, int out) {
    const float scale = (float)in / (float)out;
    const float support = scale > 1.0f ? scale : 1.0f;
    Taps t;
    t.centre = ((float)at + 0.5f) * scale;
    t.sharpness = 1.0f / support;
    t.first = (int)(t.centre - support + 0.5f);
    t.end = (int)(t.centre + support + 0.5f);
    if (t.first < 0) t.first = 0;
    if (t.end > in) t.end = in;
    return t;
}

DEVICE float weight(const Taps& t, int at) {
    float distance = ((float)at - t.centre + 0.5f) * t.sharpness;
    distance = distance < 0.0f ? -distance : distance;
    return distance < 1.0f ? 1.0f - distance : 0.0f;
}

DEVICE float byte_of(float value) {
    value = rintf(value);
    return value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value;
}

DEVICE void store(const Image& image, int x, int y, const float* pixel, const Colours& colours, int type, int planar) {
    long long at = planar ? (long long)y * image.row + x : (long long)y * image.row + 3 * x;
    const long long step = planar ? (long long)image.row * image.target_height : 1;
    for (int colour = 0; colour < 3; ++colour, at += step) {
        const float value = (pixel[colour] - colours.mean[colour]) * colours.scale[colour];
        if (type == UINT8) ((u8*)image.target)[at] = (u8)pixel[colour];
        else if (type == FLOAT16) ((unsigned short*)image.target)[at] = to_half(value);
        else ((float*)image.target)[at] = value;
    }
}

// Weights of one axis that are kept in registers; images are rarely made more than three times smaller.
const int FEW = 8;

// Add up to FEW pixels that lie one behind the other, read by words: single bytes would be three times as many loads.
// `shares` is 0 from `count` on. No word is read that has no byte of a pixel in it.
DEVICE void add_run(float* sum, const float* shares, const u8* first, int count) {
    const u64 address = (u64)first;
    const unsigned* words = (const unsigned*)(address & ~(u64)3);
    const int skipped = (int)(address & 3), bytes = 3 * count, last = (skipped + bytes - 1) >> 2;
    unsigned low = words[0];
#pragma unroll
    for (int word = 0; word < 3 * FEW / 4; ++word) {
        if (4 * word < bytes) {
            const unsigned high = word < last ? words[word + 1] : 0u;
            const unsigned four = from_byte(low, high, skipped);
            low = high;
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                const int at = 4 * word + byte;
                sum[at % 3] += shares[at / 3] * (float)(four >> (8 * byte) & 255u);
            }
        }
    }
}

DEVICE void add(float* sum, float share, const u8* pixel) {
    sum[0] += share * pixel[0];
    sum[1] += share * pixel[1];
    sum[2] += share * pixel[2];
}

// One thread a pixel of the result, one plane of blocks an image. Rows are rounded to 8 bits between the two axes, as
// Pillow does, so that results agree to the last bit but for rounding at the halves.
KERNEL finish(const Image* __restrict__ images, Colours colours, int type, int planar) {
    const Image image = images[blockIdx.z];
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= image.target_width || y >= image.target_height) return;
    const int column = image.cut_x + (image.mirror ? image.target_width - 1 - x : x);
    const Taps across = taps(column, image.w, image.out_width), down = taps(image.cut_y + y, image.h, image.out_height);
    const View view = shown(image);
    const u8* corner = view.origin + image.x * view.along_x + image.y * view.along_y;

    float few[FEW], across_sum = 0.0f;
    for (int i = across.first; i < across.end; ++i) across_sum += weight(across, i);
    const float across_share = 1.0f / across_sum;
    const int count = across.end - across.first;
#pragma unroll
    for (int i = 0; i < FEW; ++i) few[i] = i < count ? weight(across, across.first + i) * across_share : 0.0f;
    const bool in_a_run = view.along_x == 3 && count <= FEW;

    float sum[3] = {0.0f, 0.0f, 0.0f}, down_sum = 0.0f;
    for (int j = down.first; j < down.end; ++j) {
        const float of_row = weight(down, j);
        float row[3] = {0.0f, 0.0f, 0.0f};
        const u8* at = corner + j * view.along_y + across.first * view.along_x;
        if (in_a_run) {
            add_run(row, few, at, count);
        } else {
            for (int i = 0; i < count; ++i) {
                add(row, weight(across, across.first + i) * across_share, at + i * view.along_x);
            }
        }
        down_sum += of_row;
        for (int colour = 0; colour < 3; ++colour) sum[colour] += of_row * byte_of(row[colour]);
    }
    for (int colour = 0; colour < 3; ++colour) sum[colour] = byte_of(sum[colour] / down_sum);
    store(image, x, y, sum, colours, type, planar);
}

// Codes of `VERDICTS` in kernels.py.
enum Verdict { FINE, NO_START, NO_END, MARKERS, FRAME, TABLES };

const int TAIL = 64, SEGMENTS = 1024;

DEVICE bool is_table(int code) {
    return code == 0xC4 || code == 0xDB || code == 0xDD || code == 0xFE || (code >= 0xE0 && code <= 0xEF);
}

DEVICE bool has_end(const u8* data, long long size) {
    for (long long at = size - 2; at >= 2 && at >= size - TAIL; --at) {
        if (data[at] == 0xFF && data[at + 1] == 0xD9) return true;
    }
    return false;
}

DEVICE int verdict_on(const Payload& payload) {
    const u8* data = (const u8*)payload.address;
    const long long size = (long long)payload.size;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return NO_START;
    if (!has_end(data, size)) return NO_END;
    long long at = 2;
    bool framed = false;
    for (int segment = 0; segment < SEGMENTS; ++segment) {
        if (at + 4 > size || data[at] != 0xFF) return MARKERS;
        const int code = data[at + 1];
        const u8* body = data + at + 4;
        const int length = (data[at + 2] << 8 | data[at + 3]) - 2;
        at += 4 + length;
        if (length < 0 || at > size) return MARKERS;
        if (code == 0xDA) return framed ? FINE : MARKERS;
        if (code == 0xC0 + payload.sof && !framed) {
            if (length < 6 || length != 6 + 3 * body[5] || body[0] != 8) return FRAME;
            const int height = body[1] << 8 | body[2], width = body[3] << 8 | body[4];
            if (height != payload.height || width != payload.width || body[5] != payload.components) return FRAME;
            framed = true;
        } else if (!is_table(code)) {
            return MARKERS;
        }
    }
    return TABLES;
}

// One thread a payload: follows the markers to the first scan, and compares the frame with what the index says. An
// engine that decodes by the index's word writes where the index says, so a frame that is larger must not reach it.
KERNEL inspect(const Payload* __restrict__ payloads, int count, int* __restrict__ verdicts) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) verdicts[at] = verdict_on(payloads[at]);
}

#ifndef __CUDACC__
extern "C" void finish_all(
    const Image* images, int count, const Colours* colours, int type, int planar, int width, int height
) {
    blockDim = {1, 1, 1};
    threadIdx = {0, 0, 0};
    for (blockIdx.z = 0; blockIdx.z < count; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < height; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < width; ++blockIdx.x) finish(images, *colours, type, planar);
}

extern "C" void inspect_all(const Payload* payloads, int count, int* verdicts) {
    blockDim = {1, 1, 1};
    threadIdx = {0, 0, 0};
    for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) inspect(payloads, count, verdicts);
}
#endif

// What looks at bytes: fills and patterns.
#include "common.cuh"

// A range of bytes as whole 16-byte vectors between two edges of less than 16 bytes, neither of which crosses a multiple of 16.
struct Parts {
    u64 body;    // first address of the vectors
    u64 vectors;
    u64 tail;    // first address after them
    u64 end;
};
DEVICE Parts parts(u64 start, u64 bytes) {
    Parts p;
    u64 head = (16 - (start & 15)) & 15;
    if (head > bytes) head = bytes;
    p.body = start + head;
    p.vectors = (bytes - head) / 16;
    p.tail = p.body + 16 * p.vectors;
    p.end = start + bytes;
    return p;
}

// The byte at address a becomes byte a mod 8 of the pattern.
KERNEL fill(u8 *to, u64 bytes, u64 pattern) {
    u64 start = (u64)to, i = thread_index(), step = thread_count();
    Parts p = parts(start, bytes);
    uint4 v = make_uint4((u32)pattern, (u32)(pattern >> 32), (u32)pattern, (u32)(pattern >> 32));
    uint4 *body = (uint4 *)p.body;
    for (u64 k = i; k < p.vectors; k += step) body[k] = v;
    if (i < p.body - start) to[i] = (u8)(pattern >> (8 * ((start + i) & 7)));
    if (i < p.end - p.tail) ((u8 *)p.tail)[i] = (u8)(pattern >> (8 * (i & 7)));
}

// The word of 8 bytes at an address that is a multiple of 8.
DEVICE u64 pattern_word(u64 address, u64 seed) { return mix(seed + (address / 8 + 1) * GAMMA); }

KERNEL pattern_write(u8 *to, u64 bytes, u64 seed) {
    u64 start = (u64)to, i = thread_index(), step = thread_count();
    Parts p = parts(start, bytes);
    ulonglong2 *body = (ulonglong2 *)p.body;
    for (u64 k = i; k < p.vectors; k += step) {
        u64 at = p.body + 16 * k;
        body[k] = make_ulonglong2(pattern_word(at, seed), pattern_word(at + 8, seed));
    }
    if (i < p.body - start) to[i] = (u8)(pattern_word((start + i) & ~7ULL, seed) >> (8 * ((start + i) & 7)));
    if (i < p.end - p.tail) ((u8 *)p.tail)[i] = (u8)(pattern_word((p.tail + i) & ~7ULL, seed) >> (8 * (i & 7)));
}

// What a thread found wrong: words, and the complement of the first wrong byte's address (0: none).
struct Wrong { u64 words, not_first; };

// Notes that a word differs from what it should be in the bytes where `difference` is not 0.
DEVICE void note(Wrong &wrong, u64 word, u64 difference) {
    if (difference == 0) return;
    u64 first = word + (u64)((__ffsll((i64)difference) - 1) / 8);
    wrong.words += 1;
    if (~first > wrong.not_first) wrong.not_first = ~first;
}

// Compares the bytes of a word that lie in from..end.
DEVICE void verify_part(Wrong &wrong, u64 word, u64 from, u64 end, u64 seed) {
    u64 should = pattern_word(word, seed), difference = 0;
    for (int b = 0; b < 8; b++) {
        u64 at = word + b;
        if (at >= from && at < end) {
            u64 is = *(const u8 *)at;
            difference |= ((should >> (8 * b) & 0xFF) ^ is) << (8 * b);
        }
    }
    note(wrong, word, difference);
}

// result[0] += words that differ; result[1] = the largest complement of a differing byte's address, its own included.
KERNEL pattern_verify(const u8 *from, u64 bytes, u64 seed, u64 *result) {
    u64 start = (u64)from, i = thread_index(), step = thread_count();
    Parts p = parts(start, bytes);
    const ulonglong2 *body = (const ulonglong2 *)p.body;
    Wrong wrong = {0, 0};
#pragma unroll 4
    for (u64 k = i; k < p.vectors; k += step) {
        u64 at = p.body + 16 * k;
        ulonglong2 is = body[k];
        note(wrong, at, is.x ^ pattern_word(at, seed));
        note(wrong, at + 8, is.y ^ pattern_word(at + 8, seed));
    }
    if (i < 2) {
        u64 head = (start & ~7ULL) + 8 * i, tail = p.tail + 8 * i;
        if (head < p.body) verify_part(wrong, head, start, p.body, seed);
        if (tail < p.end) verify_part(wrong, tail, p.tail, p.end, seed);
    }
    if (wrong.words > 0) {
        atomicAdd(&result[0], wrong.words);
        atomicMax(&result[1], wrong.not_first);
    }
}

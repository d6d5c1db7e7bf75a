//! `fill`, `pattern_write`, `pattern_verify`.

use aquifer_device::DevicePtr;
use aquifer_kernels::{DType, Kernels, Target, pattern_bytes, pattern_word};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::bench::{Bench, Plain, assert_agree, bytes_as, lens};

fn check_fill<T: Plain>(bench: &Bench, value: T, len: usize, shift: u64) {
    let mut memory = bench.guarded(&vec![T::of(&vec![0; size_of::<T>()]); len], shift);
    bench.kernels.fill(&bench.stream, &mut memory.part, value).unwrap();
    assert_agree(&bench.between(&memory), &vec![value; len], |_| false);
}

/// The words of the generator, from state to state as in its publication: an oracle for the formula
/// by index.
struct SplitMix64(u64);

impl Iterator for SplitMix64 {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Some(z ^ (z >> 31))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn fill_sets_every_element_and_no_other(len in lens(), shift in 0u64..8, bits in any::<u64>()) {
        let bench = Bench::new();
        let bytes = bits.to_le_bytes();
        check_fill::<u8>(&bench, u8::of(&bytes[..1]), len, shift);
        check_fill::<bf16>(&bench, bf16::of(&bytes[..2]), len, shift);
        check_fill::<f16>(&bench, f16::of(&bytes[..2]), len, shift);
        check_fill::<i32>(&bench, i32::of(&bytes[..4]), len, shift);
        check_fill::<u32>(&bench, u32::of(&bytes[..4]), len, shift);
        check_fill::<f32>(&bench, f32::of(&bytes[..4]), len, shift);
        check_fill::<i64>(&bench, i64::of(&bytes), len, shift);
        check_fill::<u64>(&bench, u64::of(&bytes), len, shift);
        check_fill::<f64>(&bench, f64::of(&bytes), len, shift);
    }

    #[test]
    fn patterns_are_what_the_generator_gives(len in lens(), shift in 0u64..16, seed in any::<u64>()) {
        let bench = Bench::new();
        let mut memory = bench.guarded(&vec![0u8; len], shift);
        bench.kernels.pattern_write(&bench.stream, &mut memory.part, seed).unwrap();
        let start = memory.part.ptr().0;
        // From the memory's first word on; the generator's first output is the word at address 0.
        let state = seed.wrapping_add((start / 8).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let bytes = SplitMix64(state).flat_map(u64::to_le_bytes).skip((start % 8) as usize);
        prop_assert_eq!(bench.between(&memory), bytes.take(len).collect::<Vec<u8>>());
    }

    #[test]
    fn every_wrong_byte_is_found(
        len in 1usize..3000,
        shift in 0u64..16,
        wrong in proptest::collection::btree_map(any::<usize>(), 1u8..=255, 0..4),
    ) {
        let bench = Bench::new();
        let mut memory = bench.guarded(&vec![0u8; len], shift);
        bench.kernels.pattern_write(&bench.stream, &mut memory.part, 7).unwrap();
        let mut content = bench.between(&memory);
        let start = memory.part.ptr().0;
        let mut damaged = std::collections::BTreeSet::new();
        for (index, change) in wrong {
            let at = index % len;
            if damaged.insert(at as u64) {
                content[at] ^= change;
            }
        }
        bench.put(&memory.part, &content);
        let mut findings = bench.upload(&[0u64; Kernels::FINDINGS_LEN]);
        bench.kernels.pattern_verify(&bench.stream, &memory.part, 7, &mut findings).unwrap();
        let found = bench.kernels.mismatches(&bench.stream, &findings).unwrap();
        let words: std::collections::BTreeSet<_> = damaged.iter().map(|at| (start + at) / 8).collect();
        let first = damaged.first().map(|at| DevicePtr(start + at));
        prop_assert_eq!(found.map(|found| (found.words, found.first)), first.map(|first| (words.len() as u64, first)));
    }
}

#[test]
fn patterns_differ_by_address_and_by_seed() {
    let word = |address, seed| pattern_word(DevicePtr(address), seed);
    assert_eq!(word(0, 0), SplitMix64(0).next().unwrap());
    assert_eq!(word(4096, 3), word(4103, 3));
    let mut all: Vec<_> = (0..4096).flat_map(|k| (0..16).map(move |seed| word(8 * k, seed))).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4096 * 16);
    let mut bytes = [0; 11];
    pattern_bytes(DevicePtr(13), 5, &mut bytes);
    assert_eq!(bytes[..3], word(8, 5).to_le_bytes()[5..]);
    assert_eq!(bytes[3..], word(16, 5).to_le_bytes());
}

#[test]
fn verification_finds_overlap_stale_contents_and_lost_writes() {
    let bench = Bench::new();
    let (kernels, stream) = (&bench.kernels, &bench.stream);
    let memory = bench.alloc::<u8>(10_000);
    let findings = |from: &aquifer::Buffer<u8>, seed| {
        let mut findings = bench.upload(&[0u64; 2]);
        kernels.pattern_verify(stream, from, seed, &mut findings).unwrap();
        kernels.mismatches(stream, &findings).unwrap()
    };
    // Two owners of overlapping memory: the first one's memory contains the second one's pattern.
    let (mut one, mut two) = (memory.slice(..6000).share(), memory.slice(5000..).share());
    kernels.pattern_write(stream, &mut one, 1).unwrap();
    kernels.pattern_write(stream, &mut two, 2).unwrap();
    let found = findings(&one, 1).unwrap();
    assert_eq!((found.words, found.first), (125, one.ptr().offset(5000)));
    assert_eq!(findings(&two, 2), None);
    // An earlier owner's pattern.
    assert_eq!(findings(&two, 3).unwrap().words, 625);
    // A write without its last part.
    kernels.pattern_write(stream, &mut memory.slice(..9992).share(), 4).unwrap();
    let found = findings(&memory, 4).unwrap();
    assert_eq!((found.words, found.first), (1, memory.ptr().offset(9992)));
    // The same contents at another address, as after a copy to a wrong place.
    kernels.pattern_write(stream, &mut memory.share(), 5).unwrap();
    let content = bench.download(&memory);
    let other = bench.upload(&content);
    assert_eq!(findings(&other, 5).unwrap().words, 1250);
}

#[test]
fn findings_add_up_over_launches() {
    let bench = Bench::new();
    let mut findings = bench.upload(&[0u64; 2]);
    let (high, low) = (bench.upload(&[0u8; 64]), bench.upload(&[0u8; 64]));
    let (high, low) = if high.ptr() > low.ptr() { (high, low) } else { (low, high) };
    for memory in [&low, &high] {
        bench.kernels.pattern_verify(&bench.stream, memory, 1, &mut findings).unwrap();
    }
    let found = bench.kernels.mismatches(&bench.stream, &findings).unwrap().unwrap();
    assert_eq!((found.words, found.first), (16, low.ptr()));
}

#[test]
fn byte_operations_take_any_dtype() {
    let bench = Bench::new();
    let memory = bench.upload(&[0u8; 12]);
    let target = Target::new(bytes_as(&memory, DType::I32));
    bench.kernels.fill(&bench.stream, target, -2i32).unwrap();
    assert_eq!(bench.download(&memory), [0xFE, 0xFF, 0xFF, 0xFF].repeat(3));
    let mut floats = bench.upload(&[0f32; 3]);
    bench.kernels.cast(&bench.stream, bytes_as(&memory, DType::I32), &mut floats).unwrap();
    assert_eq!(bench.download(&floats), [-2.0; 3]);
}

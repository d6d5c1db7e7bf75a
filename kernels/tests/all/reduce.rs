//! `reduce_sum`.

use aquifer_kernels::Kernels;
use half::{bf16, f16};
use proptest::prelude::*;

use crate::bench::{Bench, Plain, elements, lens};

fn sum<T: Plain, D: Plain>(bench: &Bench, from: &[T], shift: u64) -> D {
    let memory = bench.guarded(from, shift);
    let mut scratch = bench.guarded(&vec![u64::MAX; Kernels::SUM_SCRATCH_LEN], 0);
    let mut to = bench.guarded(&[D::of(&vec![0xFF; size_of::<D>()])], 1);
    bench.kernels.reduce_sum(&bench.stream, &memory.part, &mut scratch.part, &mut to.part).unwrap();
    bench.between(&scratch);
    bench.between(&to)[0]
}

/// The documented order, thread by thread.
fn by_the_book(from: &[f64], size: usize) -> f64 {
    let blocks = from.len().div_ceil(4096).clamp(1, 1024);
    let (width, threads) = (16 / size, 256 * blocks);
    let vectors: Vec<&[f64]> = from.chunks(width).collect();
    let tree = |values: &dyn Fn(usize) -> f64| {
        fn level(values: &dyn Fn(usize) -> f64, thread: usize, step: usize) -> f64 {
            if step == 256 {
                values(thread)
            } else {
                level(values, thread, 2 * step) + level(values, thread + step, 2 * step)
            }
        }
        level(values, 0, 1)
    };
    let thread = |t: usize| {
        let accumulator = |which: usize| {
            let own = vectors.iter().skip(t).step_by(threads);
            own.flat_map(|vector| vector.iter().skip(which).step_by(4)).fold(0.0, |sum, x| sum + x)
        };
        (accumulator(0) + accumulator(1)) + (accumulator(2) + accumulator(3))
    };
    let of_blocks: Vec<f64> = (0..blocks).map(|block| tree(&|t| thread(256 * block + t))).collect();
    tree(&|t| of_blocks.iter().skip(t).step_by(256).fold(0.0, |sum, x| sum + x))
}

/// The sum in twice the precision (Knuth's two-sum), and that of the magnitudes.
fn precise(from: &[f64]) -> (f64, f64, f64) {
    let (mut high, mut low, mut magnitude) = (0.0, 0.0, 0.0);
    for &x in from {
        let sum = high + x;
        let part = sum - high;
        low += (high - (sum - part)) + (x - part);
        high = sum;
        magnitude += x.abs();
    }
    (high, low, magnitude)
}

/// The bits of a number; those of all NaNs are the same.
fn number(value: f32) -> Option<u32> {
    (!value.is_nan()).then_some(value.to_bits())
}

fn modest() -> impl Strategy<Value = Vec<f64>> {
    lens().prop_flat_map(|len| {
        let number = (-1f64..1.0, -30i32..30).prop_map(|(mantissa, exponent)| mantissa * 2f64.powi(exponent));
        proptest::collection::vec(number, 1..61).prop_map(move |some| some.into_iter().cycle().take(len).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn integers_are_summed_exactly_and_wrap(
        bytes in lens().prop_flat_map(elements::<u8>), ints in lens().prop_flat_map(elements::<i32>),
        words in lens().prop_flat_map(elements::<u32>), longs in lens().prop_flat_map(elements::<i64>),
        wides in lens().prop_flat_map(elements::<u64>), shift in 0u64..8,
    ) {
        let bench = Bench::new();
        prop_assert_eq!(sum::<u8, u64>(&bench, &bytes, shift), bytes.iter().map(|&x| u64::from(x)).sum::<u64>());
        prop_assert_eq!(sum::<i32, i64>(&bench, &ints, shift), ints.iter().map(|&x| i64::from(x)).sum::<i64>());
        prop_assert_eq!(sum::<u32, u64>(&bench, &words, shift), words.iter().map(|&x| u64::from(x)).sum::<u64>());
        prop_assert_eq!(i128::from(sum::<i64, i64>(&bench, &longs, shift)), {
            i128::from(longs.iter().map(|&x| i128::from(x)).sum::<i128>() as i64)
        });
        prop_assert_eq!(sum::<u64, u64>(&bench, &wides, shift), wides.iter().map(|&x| u128::from(x)).sum::<u128>() as u64);
    }

    #[test]
    fn floats_are_summed_in_the_documented_order_within_the_documented_bound(values in modest(), shift in 0u64..8) {
        let bench = Bench::new();
        let is = sum::<f64, f64>(&bench, &values, shift);
        prop_assert_eq!(is.to_bits(), by_the_book(&values, 8).to_bits());
        let (high, low, magnitude) = precise(&values);
        let d = (values.len() as f64 / f64::from(1 << 19) + 31.0) * 2f64.powi(-53);
        prop_assert!(((is - high) - low).abs() <= d / (1.0 - d) * magnitude * (1.0 + 1e-9));

        let singles: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let wide: Vec<f64> = singles.iter().map(|&x| x.into()).collect();
        prop_assert_eq!(number(sum::<f32, f32>(&bench, &singles, shift)), number(by_the_book(&wide, 4) as f32));
        let halves: Vec<f16> = values.iter().map(|&x| f16::from_f64(x)).collect();
        let wide: Vec<f64> = halves.iter().map(|&x| x.into()).collect();
        prop_assert_eq!(number(sum::<f16, f32>(&bench, &halves, shift)), number(by_the_book(&wide, 2) as f32));
        let brains: Vec<bf16> = values.iter().map(|&x| bf16::from_f64(x)).collect();
        let wide: Vec<f64> = brains.iter().map(|&x| x.into()).collect();
        prop_assert_eq!(number(sum::<bf16, f32>(&bench, &brains, shift)), number(by_the_book(&wide, 2) as f32));
    }
}

#[test]
fn more_elements_than_threads() {
    let bench = Bench::new();
    // 4 Mi elements fill the 1024 blocks; with more, threads continue after the grid.
    let values: Vec<u8> = (0..(4 << 20) + 70_001u32).map(|index| (index % 251) as u8).collect();
    assert_eq!(sum::<u8, u64>(&bench, &values, 3), values.iter().map(|&x| u64::from(x)).sum::<u64>());
    let floats: Vec<f32> = values.iter().map(|&x| f32::from(x)).collect();
    // Integers below 2^53 are exact in f64, in every order.
    let exact: f64 = floats.iter().map(|&x| f64::from(x)).sum();
    assert_eq!(sum::<f32, f32>(&bench, &floats, 0), exact as f32);
}

#[test]
fn infinities_and_nans_propagate() {
    let bench = Bench::new();
    assert_eq!(sum::<f32, f32>(&bench, &[], 0).to_bits(), 0);
    assert_eq!(sum::<f32, f32>(&bench, &[-0.0; 5], 0).to_bits(), 0);
    assert_eq!(sum::<f32, f32>(&bench, &[1.0, f32::INFINITY, 2.0], 0), f32::INFINITY);
    assert!(sum::<f32, f32>(&bench, &[f32::INFINITY, 1.0, f32::NEG_INFINITY], 0).is_nan());
    assert!(sum::<f16, f32>(&bench, &[f16::ONE, f16::NAN], 0).is_nan());
    // Intermediate sums are beyond f32.
    assert_eq!(sum::<f32, f32>(&bench, &[f32::MAX, f32::MAX, -f32::MAX, 0.0], 0), f32::MAX);
    assert_eq!(sum::<f32, f32>(&bench, &[f32::MAX, f32::MAX], 0), f32::INFINITY);
}

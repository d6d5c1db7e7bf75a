//! `add` and `axpy`.

use half::{bf16, f16};
use proptest::prelude::*;

use crate::bench::{Bench, Plain, assert_agree, elements, lens};

fn check_add<T: Plain>(bench: &Bench, a: &[T], b: &[T], shift: u64, oracle: impl Fn(T, T) -> T, nan: fn(T) -> bool) {
    let (left, right) = (bench.guarded(a, shift), bench.guarded(b, shift));
    let mut to = bench.guarded(a, shift / 2);
    bench.kernels.add(&bench.stream, &left.part, &right.part, &mut to.part).unwrap();
    let should: Vec<T> = a.iter().zip(b).map(|(&a, &b)| oracle(a, b)).collect();
    assert_agree(&bench.between(&to), &should, nan);
    // In place.
    let mut same = left.part.share();
    bench.kernels.add(&bench.stream, &left.part, &right.part, &mut same).unwrap();
    assert_agree(&bench.between(&left), &should, nan);
    assert_agree(&bench.between(&right), b, |_| false);
}

fn check_axpy<T: Plain>(
    bench: &Bench,
    a: f64,
    x: &[T],
    y: &[T],
    shift: u64,
    f: impl Fn(T, T) -> T,
    nan: fn(T) -> bool,
) {
    let (left, mut right) = (bench.guarded(x, shift), bench.guarded(y, shift));
    bench.kernels.axpy(&bench.stream, a, &left.part, &mut right.part).unwrap();
    let should: Vec<T> = x.iter().zip(y).map(|(&x, &y)| f(x, y)).collect();
    assert_agree(&bench.between(&right), &should, nan);
}

fn pairs<T: Plain>() -> impl Strategy<Value = (Vec<T>, Vec<T>)> {
    lens().prop_flat_map(|len| (elements::<T>(len), elements::<T>(len)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn integers_wrap(
        bytes in pairs::<u8>(), ints in pairs::<i32>(), words in pairs::<u32>(), longs in pairs::<i64>(),
        wides in pairs::<u64>(), shift in 0u64..8,
    ) {
        let bench = Bench::new();
        // As wider integers, reduced to their low bits.
        check_add(&bench, &bytes.0, &bytes.1, shift, |a, b| (u32::from(a) + u32::from(b)) as u8, |_| false);
        check_add(&bench, &ints.0, &ints.1, shift, |a, b| (i64::from(a) + i64::from(b)) as i32, |_| false);
        check_add(&bench, &words.0, &words.1, shift, |a, b| (u64::from(a) + u64::from(b)) as u32, |_| false);
        check_add(&bench, &longs.0, &longs.1, shift, |a, b| (i128::from(a) + i128::from(b)) as i64, |_| false);
        check_add(&bench, &wides.0, &wides.1, shift, |a, b| (u128::from(a) + u128::from(b)) as u64, |_| false);
    }

    #[test]
    fn floats_are_rounded_once(
        halves in pairs::<f16>(), brains in pairs::<bf16>(), floats in pairs::<f32>(), doubles in pairs::<f64>(),
        shift in 0u64..8,
    ) {
        let bench = Bench::new();
        // As f64, which represents sums of f16 exactly; f32 suffices for those of bf16, as its
        // range is the same.
        let half = |a: f16, b: f16| f16::from_f32((a.to_f64() + b.to_f64()) as f32);
        check_add(&bench, &halves.0, &halves.1, shift, half, f16::is_nan);
        let brain = |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
        check_add(&bench, &brains.0, &brains.1, shift, brain, bf16::is_nan);
        check_add(&bench, &floats.0, &floats.1, shift, |a, b| a + b, f32::is_nan);
        check_add(&bench, &doubles.0, &doubles.1, shift, |a, b| a + b, f64::is_nan);
    }

    #[test]
    fn axpy_rounds_once_in_the_wider_type(
        halves in pairs::<f16>(), brains in pairs::<bf16>(), floats in pairs::<f32>(), doubles in pairs::<f64>(),
        a in -1000f64..1000.0, shift in 0u64..8,
    ) {
        let bench = Bench::new();
        let single = a as f32;
        let half = |x: f16, y: f16| f16::from_f32(single.mul_add(x.to_f32(), y.to_f32()));
        check_axpy(&bench, a, &halves.0, &halves.1, shift, half, f16::is_nan);
        let brain = |x: bf16, y: bf16| bf16::from_f32(single.mul_add(x.to_f32(), y.to_f32()));
        check_axpy(&bench, a, &brains.0, &brains.1, shift, brain, bf16::is_nan);
        check_axpy(&bench, a, &floats.0, &floats.1, shift, |x, y| single.mul_add(x, y), f32::is_nan);
        check_axpy(&bench, a, &doubles.0, &doubles.1, shift, |x, y| a.mul_add(x, y), f64::is_nan);
    }
}

#[test]
fn a_product_is_not_rounded_before_it_is_added() {
    let bench = Bench::new();
    let x = 1.0 + f32::EPSILON;
    let (from, mut to) = (bench.upload(&[x]), bench.upload(&[-1.0 - 2.0 * f32::EPSILON]));
    bench.kernels.axpy(&bench.stream, f64::from(x), &from, &mut to).unwrap();
    assert_eq!(bench.download(&to), [f32::EPSILON * f32::EPSILON]);
}

//! `cast`, all pairs, against Rust's `as` where there is one and the crate `half`.

use half::{bf16, f16};
use proptest::prelude::*;

use crate::bench::{Bench, Plain, assert_agree, elements, lens};

/// The expected result of a conversion, by the language alone.
trait Oracle<D> {
    fn convert(self) -> D;
}

macro_rules! by_language {
    ($($from:ty as $($to:ty)*;)*) => {$($(
        impl Oracle<$to> for $from {
            fn convert(self) -> $to {
                self as $to
            }
        }
    )*)*};
}

by_language! {
    u8 as i32 u32 i64 u64 f32 f64;
    i32 as u8 u32 i64 u64 f32 f64;
    u32 as u8 i32 i64 u64 f32 f64;
    i64 as u8 i32 u32 u64 f32 f64;
    u64 as u8 i32 u32 i64 f32 f64;
    f32 as u8 i32 u32 i64 u64 f64;
    f64 as u8 i32 u32 i64 u64 f32;
}

/// From 16 bits exactly to `f32`, and from there.
macro_rules! from_halves {
    ($($from:ident to $($to:ty)*;)*) => {$($(
        impl Oracle<$to> for $from {
            fn convert(self) -> $to {
                self.to_f32() as $to
            }
        }
    )*)*};
}

from_halves! {
    f16 to u8 i32 u32 i64 u64 f32 f64;
    bf16 to u8 i32 u32 i64 u64 f32 f64;
}

impl Oracle<bf16> for f16 {
    fn convert(self) -> bf16 {
        bf16::from_f32(self.to_f32())
    }
}

impl Oracle<f16> for bf16 {
    fn convert(self) -> f16 {
        f16::from_f32(self.to_f32())
    }
}

impl Oracle<f16> for f32 {
    fn convert(self) -> f16 {
        f16::from_f32(self)
    }
}

impl Oracle<bf16> for f32 {
    fn convert(self) -> bf16 {
        bf16::from_f32(self)
    }
}

/// An `f32` on the same side of every 16-bit value, and of every midpoint of two, as the number
/// `n`. Of the two neighbours of `n` it is the one with odd bits.
fn odd(n: f64) -> f32 {
    let near = n as f32;
    if f64::from(near) == n || n.is_nan() || near.to_bits() & 1 == 1 {
        return near;
    }
    if f64::from(near) < n { near.next_up() } else { near.next_down() }
}

macro_rules! to_halves {
    ($($from:ty)*) => {$(
        impl Oracle<f16> for $from {
            fn convert(self) -> f16 {
                f16::from_f32(odd_of(self as i128, self as f64))
            }
        }

        impl Oracle<bf16> for $from {
            fn convert(self) -> bf16 {
                bf16::from_f32(odd_of(self as i128, self as f64))
            }
        }
    )*};
}

to_halves!(u8 i32 u32 i64 u64);

/// As [`odd`], for an integer with the given nearest `f64`.
fn odd_of(n: i128, near: f64) -> f32 {
    let rest = n - near as i128;
    let single = odd(near);
    // A number that f64 cannot represent f32 cannot either, unless rounding made it so.
    if rest == 0 || single.to_bits() & 1 == 1 {
        return single;
    }
    let away = (rest > 0) == (n > 0);
    f32::from_bits(if away { single.to_bits() + 1 } else { single.to_bits() - 1 })
}

impl Oracle<f16> for f64 {
    fn convert(self) -> f16 {
        f16::from_f32(odd(self))
    }
}

impl Oracle<bf16> for f64 {
    fn convert(self) -> bf16 {
        bf16::from_f32(odd(self))
    }
}

trait Nan: Sized {
    const CANONICAL: Option<Self>;

    fn nan(self) -> bool;
}

macro_rules! nan {
    ($($type:ty: $canonical:expr, $is:expr;)*) => {$(
        impl Nan for $type {
            const CANONICAL: Option<Self> = $canonical;

            fn nan(self) -> bool {
                $is(self)
            }
        }
    )*};
}

nan! {
    u8: None, |_| false;
    i32: None, |_| false;
    u32: None, |_| false;
    i64: None, |_| false;
    u64: None, |_| false;
    f16: Some(f16::from_bits(0x7E00)), f16::is_nan;
    bf16: Some(bf16::from_bits(0x7FC0)), bf16::is_nan;
    f32: Some(f32::from_bits(0x7FC0_0000)), f32::is_nan;
    f64: Some(f64::from_bits(0x7FF8_0000_0000_0000)), f64::is_nan;
}

fn check<S: Plain + Oracle<D>, D: Plain + Nan>(bench: &Bench, from: &[S], shift: u64) {
    let (source, mut to) =
        (bench.guarded(from, shift), bench.guarded(&vec![D::of(&vec![0; size_of::<D>()]); from.len()], shift / 2));
    bench.kernels.cast(&bench.stream, &source.part, &mut to.part).unwrap();
    let canonical = |value: D| if value.nan() { D::CANONICAL.unwrap() } else { value };
    let should: Vec<D> = from.iter().map(|&element| canonical(element.convert())).collect();
    let is = bench.between(&to);
    if let Some(wrong) = (0..is.len()).find(|&index| is[index].bytes() != should[index].bytes()) {
        panic!("{:?} of {} as {} is {:?}", from[wrong], S::DTYPE, D::DTYPE, is[wrong]);
    }
    assert_agree(&is, &should, |_| false);
}

fn inputs<T: Plain>() -> impl Strategy<Value = Vec<T>> {
    lens().prop_flat_map(elements::<T>)
}

macro_rules! casts {
    ($($name:ident: $from:ident to $($to:ident)*;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(24))]

            $(
                #[test]
                fn $name(from in inputs::<$from>(), shift in 0u64..8) {
                    let bench = Bench::new();
                    $(check::<$from, $to>(&bench, &from, shift);)*
                }
            )*
        }
    };
}

casts! {
    from_u8: u8 to i32 u32 i64 u64 f16 bf16 f32 f64;
    from_i32: i32 to u8 u32 i64 u64 f16 bf16 f32 f64;
    from_u32: u32 to u8 i32 i64 u64 f16 bf16 f32 f64;
    from_i64: i64 to u8 i32 u32 u64 f16 bf16 f32 f64;
    from_u64: u64 to u8 i32 u32 i64 f16 bf16 f32 f64;
    from_f16: f16 to u8 i32 u32 i64 u64 bf16 f32 f64;
    from_bf16: bf16 to u8 i32 u32 i64 u64 f16 f32 f64;
    from_f32: f32 to u8 i32 u32 i64 u64 f16 bf16 f64;
    from_f64: f64 to u8 i32 u32 i64 u64 f16 bf16 f32;
}

#[test]
fn all_sixteen_bit_values_and_ties() {
    let bench = Bench::new();
    let all: Vec<u16> = (0..=u16::MAX).collect();
    check::<f16, bf16>(&bench, &all.iter().copied().map(f16::from_bits).collect::<Vec<_>>(), 0);
    check::<f16, u8>(&bench, &all.iter().copied().map(f16::from_bits).collect::<Vec<_>>(), 1);
    check::<bf16, f16>(&bench, &all.iter().copied().map(bf16::from_bits).collect::<Vec<_>>(), 0);
    check::<bf16, i64>(&bench, &all.iter().copied().map(bf16::from_bits).collect::<Vec<_>>(), 0);
    for near in [-1i64, 0, 1] {
        let between = |low: f64, high: f64| f64::from_bits(low.midpoint(high).to_bits().wrapping_add_signed(near));
        let halves = all.windows(2).map(|pair| between(f16::from_bits(pair[0]).into(), f16::from_bits(pair[1]).into()));
        check::<f64, f16>(&bench, &halves.collect::<Vec<f64>>(), 0);
        let brains =
            all.windows(2).map(|pair| between(bf16::from_bits(pair[0]).into(), bf16::from_bits(pair[1]).into()));
        check::<f64, bf16>(&bench, &brains.collect::<Vec<f64>>(), 0);
    }
}

#[test]
fn values_at_the_limits() {
    let bench = Bench::new();
    let cast = |value: f64| {
        let (from, mut to) = (bench.upload(&[value]), bench.upload(&[0i32]));
        bench.kernels.cast(&bench.stream, &from, &mut to).unwrap();
        bench.download(&to)[0]
    };
    assert_eq!([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -2.9, 2.9].map(cast), [0, i32::MAX, i32::MIN, -2, 2]);
    check::<f64, u64>(&bench, &[1.8446744073709552e19, 1.844_674_407_370_955e19, -1.0, 9.3e18], 0);
    check::<f32, i64>(&bench, &[9.223372e18, -9.223372e18, 9.3e18, f32::MIN_POSITIVE], 0);
    check::<u64, f32>(&bench, &[u64::MAX, u64::MAX - (1 << 39), (1 << 63) + (1 << 39) + 1], 0);
    check::<i64, bf16>(&bench, &[(1 << 62) + (1 << 54) + 1, (1 << 62) + (1 << 54), i64::MIN], 0);
    check::<i32, f16>(&bench, &[65519, 65520, -65520, 2049, 2051], 0);
}

//! Conversion between numbers for `cast`, exact up to one rounding at the end.
//!
//! Every finite value of every dtype is an integer of at most 64 bits times a power of two.
//! Conversion goes through that form, so nothing is rounded on the way; devices get the same with
//! instructions and bits (`kernels/cuda/cast.cu`).

use half::{bf16, f16};

/// A number, exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Exact {
    Nan,
    Infinite {
        negative: bool,
    },
    /// ± magnitude · 2^exponent; zero has a sign, too.
    Finite {
        negative: bool,
        magnitude: u64,
        exponent: i32,
    },
}

/// A type that can be converted.
pub(crate) trait Number: Copy {
    const IS_FLOAT: bool;

    fn decode(self) -> Exact;

    /// The nearest value for floats; for integers the value towards zero, clamped to the range,
    /// with 0 for NaN.
    fn encode(value: Exact) -> Self;

    /// An integer's low bits.
    fn wrap(value: i128) -> Self;
}

/// Converts as `cast` does: integers to integers wrap, all else is [`Number::encode`].
pub(crate) fn convert<S: Number, D: Number>(value: S) -> D {
    match value.decode() {
        Exact::Finite { negative, magnitude, .. } if !S::IS_FLOAT && !D::IS_FLOAT => {
            let magnitude = i128::from(magnitude);
            D::wrap(if negative { -magnitude } else { magnitude })
        }
        exact => D::encode(exact),
    }
}

/// The integer part, clamped to 65 bits and a sign, which is beyond every dtype.
fn truncate(value: Exact) -> i128 {
    const BEYOND: i128 = 1 << 65;
    let (negative, magnitude) = match value {
        Exact::Nan => return 0,
        Exact::Infinite { negative } => (negative, BEYOND),
        Exact::Finite { negative, magnitude: 0, .. } => (negative, 0),
        Exact::Finite { negative, magnitude, exponent } => {
            let bits = 64 - magnitude.leading_zeros().cast_signed();
            let held = match exponent {
                ..=-64 => 0,
                -63..=-1 => i128::from(magnitude >> exponent.unsigned_abs()),
                0.. if bits.saturating_add(exponent) > 65 => BEYOND,
                0.. => i128::from(magnitude) << exponent,
            };
            (negative, held)
        }
    };
    if negative { -magnitude } else { magnitude }
}

macro_rules! integers {
    ($($type:ty,)*) => {$(
        impl Number for $type {
            const IS_FLOAT: bool = false;

            fn decode(self) -> Exact {
                let value = i128::from(self);
                // No dtype has more than 64 bits.
                let magnitude = u64::try_from(value.unsigned_abs()).unwrap_or(u64::MAX);
                Exact::Finite { negative: value < 0, magnitude, exponent: 0 }
            }

            fn encode(value: Exact) -> Self {
                let held = truncate(value).clamp(i128::from(<$type>::MIN), i128::from(<$type>::MAX));
                Self::wrap(held)
            }

            #[allow(clippy::cast_possible_truncation, reason = "wrapping is what it is for")]
            fn wrap(value: i128) -> Self {
                value as $type
            }
        }
    )*};
}

integers!(u8, i32, u32, i64, u64,);

/// An IEEE 754 format, by the bits of its exponent and of its mantissa.
struct Format {
    exponent: u32,
    mantissa: u32,
}

impl Format {
    const fn bias(&self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// The exponent field of infinities and NaNs.
    const fn top(&self) -> u64 {
        (1 << self.exponent) - 1
    }

    fn decode(&self, bits: u64) -> Exact {
        let negative = bits >> (self.exponent + self.mantissa) & 1 == 1;
        let field = bits >> self.mantissa & self.top();
        let mantissa = bits & ((1 << self.mantissa) - 1);
        if field == self.top() {
            return if mantissa == 0 { Exact::Infinite { negative } } else { Exact::Nan };
        }
        // Subnormal numbers have the exponent of the least normal ones, and no hidden bit.
        let hidden = u64::from(field > 0) << self.mantissa;
        // A field has at most 11 bits.
        let exponent = i32::try_from(field.max(1)).unwrap_or(i32::MAX) - self.bias() - self.mantissa.cast_signed();
        Exact::Finite { negative, magnitude: hidden | mantissa, exponent }
    }

    fn encode(&self, value: Exact) -> u64 {
        let infinite = self.top() << self.mantissa;
        let sign = |negative| u64::from(negative) << (self.exponent + self.mantissa);
        match value {
            Exact::Nan => infinite | 1 << (self.mantissa - 1),
            Exact::Infinite { negative } => sign(negative) | infinite,
            Exact::Finite { negative, magnitude: 0, .. } => sign(negative),
            Exact::Finite { negative, magnitude, exponent } => {
                sign(negative) | self.encode_finite(magnitude, exponent).min(infinite)
            }
        }
    }

    /// The bits of a positive number. Beyond the range they are those of infinity or larger.
    fn encode_finite(&self, magnitude: u64, exponent: i32) -> u64 {
        let least = 1 - self.bias();
        let leading = exponent + 63 - magnitude.leading_zeros().cast_signed();
        if leading > self.bias() {
            return u64::MAX >> 1;
        }
        // The weight of the last bit of the result, against that of the magnitude.
        let dropped = leading.max(least) - self.mantissa.cast_signed() - exponent;
        let significand = if dropped <= 0 { magnitude << dropped.unsigned_abs() } else { round(magnitude, dropped) };
        // A hidden bit adds one to the field. So does a carry out of the mantissa, as it should.
        let field = u64::from((leading.max(least) + self.bias() - 1).unsigned_abs());
        (field << self.mantissa) + significand
    }
}

/// Drops the last bits, to the nearest value, ties to even.
fn round(magnitude: u64, dropped: i32) -> u64 {
    if dropped > 64 {
        return 0;
    }
    let wide = u128::from(magnitude);
    let (kept, rest, half) = (wide >> dropped, wide & ((1 << dropped) - 1), 1u128 << (dropped - 1));
    let up = rest > half || (rest == half && kept & 1 == 1);
    // At most 63 bits are kept, as at least one was dropped.
    u64::try_from(kept + u128::from(up)).unwrap_or(u64::MAX)
}

macro_rules! floats {
    ($($type:ty: $bits:ty, $exponent:literal, $mantissa:literal;)*) => {$(
        impl Number for $type {
            const IS_FLOAT: bool = true;

            fn decode(self) -> Exact {
                Format { exponent: $exponent, mantissa: $mantissa }.decode(self.to_bits().into())
            }

            #[allow(clippy::cast_possible_truncation, clippy::unnecessary_cast, reason = "the bits above are 0")]
            fn encode(value: Exact) -> Self {
                Self::from_bits(Format { exponent: $exponent, mantissa: $mantissa }.encode(value) as $bits)
            }

            fn wrap(value: i128) -> Self {
                let magnitude = u64::try_from(value.unsigned_abs()).unwrap_or(u64::MAX);
                Self::encode(Exact::Finite { negative: value < 0, magnitude, exponent: 0 })
            }
        }
    )*};
}

floats! {
    f16: u16, 5, 10;
    bf16: u16, 8, 7;
    f32: u32, 8, 23;
    f64: u64, 11, 52;
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "the language's conversions are the oracle")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The nearest of all finite values of a 16-bit format and its infinities, ties to the even
    /// one; tried one after the other.
    fn nearest(value: f64, of_bits: impl Fn(u16) -> f64, infinity: u16, limit: f64) -> u16 {
        let sign = u16::from(value.is_sign_negative()) << 15;
        let magnitude = value.abs();
        if magnitude >= limit {
            return sign | infinity;
        }
        let best = (0..infinity).min_by(|&a, &b| {
            let distance = |bits: u16| (of_bits(bits) - magnitude).abs();
            distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
        });
        sign | best.unwrap()
    }

    fn interesting() -> impl Strategy<Value = f64> {
        prop_oneof![
            any::<f64>(),
            any::<f32>().prop_map(f64::from),
            any::<u16>().prop_map(|bits| f16::from_bits(bits).to_f64()),
            // Between two neighbours, and next to that.
            (any::<u16>(), -1i64..=1).prop_map(|(bits, next)| {
                let (low, high) = (f16::from_bits(bits).to_f64(), f16::from_bits(bits.wrapping_add(1)).to_f64());
                f64::from_bits((low.midpoint(high)).to_bits().wrapping_add_signed(next))
            }),
            (any::<u16>(), -1i64..=1).prop_map(|(bits, next)| {
                let (low, high) = (bf16::from_bits(bits).to_f64(), bf16::from_bits(bits.wrapping_add(1)).to_f64());
                f64::from_bits((low.midpoint(high)).to_bits().wrapping_add_signed(next))
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn halves_are_the_nearest_there_are(value in interesting().prop_filter("finite or infinite", |v| !v.is_nan())) {
            // The limits are halfway between the largest value and the next one beyond the range;
            // they round up, to even.
            let half: f16 = convert(value);
            prop_assert_eq!(half.to_bits(), nearest(value, |bits| f16::from_bits(bits).to_f64(), 0x7C00, 65520.0));
            let brain: bf16 = convert(value);
            let limit = 2f64.powi(127) * (2.0 - 2f64.powi(-8));
            prop_assert_eq!(brain.to_bits(), nearest(value, |bits| bf16::from_bits(bits).to_f64(), 0x7F80, limit));
        }

        #[test]
        fn primitives_convert_as_the_language_does(value in interesting(), integer in any::<i64>(), shift in 0u32..64) {
            let single = convert::<f64, f32>(value).to_bits();
            prop_assert_eq!(single, if value.is_nan() { 0x7FC0_0000 } else { (value as f32).to_bits() });
            prop_assert_eq!(convert::<f64, u8>(value), value as u8);
            prop_assert_eq!(convert::<f64, i32>(value), value as i32);
            prop_assert_eq!(convert::<f64, u32>(value), value as u32);
            prop_assert_eq!(convert::<f64, i64>(value), value as i64);
            prop_assert_eq!(convert::<f64, u64>(value), value as u64);
            prop_assert_eq!(convert::<f32, i64>(value as f32), value as f32 as i64);
            let integer = integer >> shift;
            prop_assert_eq!(convert::<i64, u8>(integer), integer as u8);
            prop_assert_eq!(convert::<i64, i32>(integer), integer as i32);
            prop_assert_eq!(convert::<i64, u64>(integer), integer as u64);
            prop_assert_eq!(convert::<u64, i64>(integer as u64), integer);
            prop_assert_eq!(convert::<i64, f32>(integer), integer as f32);
            prop_assert_eq!(convert::<u64, f32>(integer as u64), integer as u64 as f32);
            prop_assert_eq!(convert::<i64, f64>(integer), integer as f64);
            prop_assert_eq!(convert::<u64, f64>(integer as u64), integer as u64 as f64);
            prop_assert_eq!(convert::<i32, f32>(integer as i32), integer as i32 as f32);
        }
    }

    #[test]
    fn integers_become_brain_floats_with_one_rounding() {
        // As f64 this is a tie, which would go down to even.
        let just_above_a_tie = (1i64 << 62) + (1 << 54) + 1;
        assert_eq!(convert::<i64, bf16>(just_above_a_tie).to_bits(), bf16::from_f64(2f64.powi(62)).to_bits() + 1);
        assert_eq!(convert::<i64, bf16>(just_above_a_tie - 1).to_bits(), bf16::from_f64(2f64.powi(62)).to_bits());
    }

    #[test]
    fn every_half_survives_the_way_through_wider_types() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            let (f32_of, f64_of): (f32, f64) = (convert(half), convert(brain));
            if half.is_nan() {
                assert_eq!(f32_of.to_bits(), 0x7FC0_0000);
                assert_eq!(convert::<f32, f16>(f32_of).to_bits(), 0x7E00);
            } else {
                assert_eq!(f32_of.to_bits(), half.to_f32().to_bits());
                assert_eq!(convert::<f32, f16>(f32_of).to_bits(), bits);
            }
            if brain.is_nan() {
                assert_eq!(f64_of.to_bits(), 0x7FF8_0000_0000_0000);
                assert_eq!(convert::<f64, bf16>(f64_of).to_bits(), 0x7FC0);
            } else {
                assert_eq!(f64_of.to_bits(), brain.to_f64().to_bits());
                assert_eq!(convert::<f64, bf16>(f64_of).to_bits(), bits);
            }
        }
    }
}

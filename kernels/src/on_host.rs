//! Conversion between dtypes on the host: the same numbers as `cast` on a device, bit for bit.
//!
//! Common pairs use the processor's own instructions if these follow the rules exactly; the others
//! use the exact form of [`crate::convert`]. The choice changes only the speed.

use half::{bf16, f16};

use crate::convert::{Number, convert};
use crate::dtype::{Bytes, DType, Element};

/// Why [`convert_host`] converted nothing: the caller passed slices that do not hold the same
/// number of whole elements.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{from_bytes} bytes of {from} cannot become {to_bytes} bytes of {to}: both must hold the same number of whole elements"
)]
#[non_exhaustive]
pub struct ConvertError {
    /// The dtype to convert from.
    pub from: DType,
    /// Bytes to convert.
    pub from_bytes: u64,
    /// The dtype to convert to.
    pub to: DType,
    /// Bytes of the destination.
    pub to_bytes: u64,
}

aquifer_device::debug_as_display!(ConvertError);

/// Converts elements in host memory from one dtype to another, by the rules of
/// [`crate::Kernels::cast`] and with the same bits. Memory needs no alignment. Elements of the same
/// dtype are copied, NaN with its bits.
///
/// # Errors
/// Slices that do not hold the same number of whole elements. Nothing is written then.
///
/// ```
/// use aquifer_kernels::{DType, convert_host};
/// let floats: Vec<u8> = [1.5f32, -300.0, f32::NAN].iter().flat_map(|float| float.to_le_bytes()).collect();
/// let mut bytes = [9; 3];
/// convert_host(&floats, DType::F32, &mut bytes, DType::U8)?;
/// assert_eq!(bytes, [1, 0, 0]);
/// assert!(convert_host(&floats, DType::F32, &mut bytes, DType::F16).is_err());
/// # Ok::<(), aquifer::Error>(())
/// ```
pub fn convert_host(from: &[u8], from_dtype: DType, to: &mut [u8], to_dtype: DType) -> Result<(), ConvertError> {
    let (from_bytes, to_bytes) = (from.len() as u64, to.len() as u64);
    let whole = from_bytes.is_multiple_of(from_dtype.bytes()) && to_bytes.is_multiple_of(to_dtype.bytes());
    if !whole || from_bytes / from_dtype.bytes() != to_bytes / to_dtype.bytes() {
        return Err(ConvertError { from: from_dtype, from_bytes, to: to_dtype, to_bytes });
    }
    if from_dtype == to_dtype {
        to.copy_from_slice(from);
    } else {
        by_source(from, from_dtype, to, to_dtype);
    }
    Ok(())
}

/// Converts each element. Both sides have the same number of elements.
fn each<S: Bytes, D: Bytes>(from: &[u8], to: &mut [u8], one: impl Fn(S) -> D) {
    for (from, to) in from.chunks_exact(size_of::<S>()).zip(to.chunks_exact_mut(size_of::<D>())) {
        one(S::read(from)).write(to);
    }
}

/// Conversion of elements of a type to every other type.
trait ToEach: Element {
    fn to_each(from: &[u8], to: &mut [u8], to_dtype: DType);
}

fn by_source(from: &[u8], from_dtype: DType, to: &mut [u8], to_dtype: DType) {
    match from_dtype {
        DType::U8 => u8::to_each(from, to, to_dtype),
        DType::I32 => i32::to_each(from, to, to_dtype),
        DType::U32 => u32::to_each(from, to, to_dtype),
        DType::I64 => i64::to_each(from, to, to_dtype),
        DType::U64 => u64::to_each(from, to, to_dtype),
        DType::F16 => f16::to_each(from, to, to_dtype),
        DType::BF16 => bf16::to_each(from, to, to_dtype),
        DType::F32 => f32::to_each(from, to, to_dtype),
        DType::F64 => f64::to_each(from, to, to_dtype),
    }
}

/// Declares the conversion of elements of a type, by the exact form unless another one is given.
macro_rules! to_each {
    ($($source:ty { $($variant:ident $by:expr,)* } else { $($exact:ident: $target:ty,)* })*) => {$(
        impl ToEach for $source {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the rules are those of `as`")]
            fn to_each(from: &[u8], to: &mut [u8], to_dtype: DType) {
                match to_dtype {
                    $(DType::$variant => each(from, to, $by),)*
                    $(DType::$exact => each(from, to, convert::<$source, $target>),)*
                }
            }
        }
    )*};
}

// An f32 can represent every u8, f16 and bf16, so a conversion through it rounds once. It cannot
// represent every other integer or f64, so these are converted to halves by their exact form.
to_each! {
    u8 {
        F16 |x: u8| half_of(f32::from(x)), BF16 |x: u8| brain_of(f32::from(x)),
        F32 |x: u8| f32::from(x), F64 |x: u8| f64::from(x),
    } else { U8: u8, I32: i32, U32: u32, I64: i64, U64: u64, }
    i32 {
        U8 cut::<i32, u8>, U32 cut::<i32, u32>, I64 cut::<i32, i64>, U64 cut::<i32, u64>,
        F32 |x: i32| x as f32, F64 |x: i32| f64::from(x),
    } else { I32: i32, F16: f16, BF16: bf16, }
    u32 {
        U8 cut::<u32, u8>, I32 cut::<u32, i32>, I64 cut::<u32, i64>, U64 cut::<u32, u64>,
        F32 |x: u32| x as f32, F64 |x: u32| f64::from(x),
    } else { U32: u32, F16: f16, BF16: bf16, }
    i64 {
        U8 cut::<i64, u8>, I32 cut::<i64, i32>, U32 cut::<i64, u32>, U64 cut::<i64, u64>,
        F32 |x: i64| x as f32, F64 |x: i64| x as f64,
    } else { I64: i64, F16: f16, BF16: bf16, }
    u64 {
        U8 cut::<u64, u8>, I32 cut::<u64, i32>, U32 cut::<u64, u32>, I64 cut::<u64, i64>,
        F32 |x: u64| x as f32, F64 |x: u64| x as f64,
    } else { U64: u64, F16: f16, BF16: bf16, }
    f16 {
        U8 |x: f16| x.to_f32() as u8, I32 |x: f16| x.to_f32() as i32, U32 |x: f16| x.to_f32() as u32,
        I64 |x: f16| x.to_f32() as i64, U64 |x: f16| x.to_f32() as u64,
        BF16 |x: f16| brain_of(x.to_f32()), F32 |x: f16| single_of(x.to_f32()), F64 |x: f16| double_of(x.to_f32()),
    } else { F16: f16, }
    bf16 {
        U8 |x: bf16| x.to_f32() as u8, I32 |x: bf16| x.to_f32() as i32, U32 |x: bf16| x.to_f32() as u32,
        I64 |x: bf16| x.to_f32() as i64, U64 |x: bf16| x.to_f32() as u64,
        F16 |x: bf16| half_of(x.to_f32()), F32 |x: bf16| single_of(x.to_f32()), F64 |x: bf16| double_of(x.to_f32()),
    } else { BF16: bf16, }
    f32 {
        U8 |x: f32| x as u8, I32 |x: f32| x as i32, U32 |x: f32| x as u32, I64 |x: f32| x as i64,
        U64 |x: f32| x as u64, F16 half_of, BF16 brain_of, F64 double_of,
    } else { F32: f32, }
    f64 {
        U8 |x: f64| x as u8, I32 |x: f64| x as i32, U32 |x: f64| x as u32, I64 |x: f64| x as i64,
        U64 |x: f64| x as u64, F32 narrow,
    } else { F16: f16, BF16: bf16, F64: f64, }
}

/// An integer's low bits.
fn cut<S: Into<i128>, D: Number>(value: S) -> D {
    D::wrap(value.into())
}

fn half_of(value: f32) -> f16 {
    if value.is_nan() { f16::NAN } else { f16::from_f32(value) }
}

fn brain_of(value: f32) -> bf16 {
    if value.is_nan() { bf16::NAN } else { bf16::from_f32(value) }
}

fn single_of(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}

fn double_of(value: f32) -> f64 {
    if value.is_nan() { f64::NAN } else { f64::from(value) }
}

#[allow(clippy::cast_possible_truncation, reason = "rounding is what it is for")]
fn narrow(value: f64) -> f32 {
    if value.is_nan() { f32::NAN } else { value as f32 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Conversion by the exact form, element by element.
    fn exactly(from: &[u8], from_dtype: DType, to_dtype: DType) -> Vec<u8> {
        fn pair<S: Element, D: Element>(from: &[u8]) -> Vec<u8> {
            let mut to = vec![0; from.len() / size_of::<S>() * size_of::<D>()];
            each(from, &mut to, convert::<S, D>);
            to
        }
        fn source<S: Element>(from: &[u8], to_dtype: DType) -> Vec<u8> {
            match to_dtype {
                DType::U8 => pair::<S, u8>(from),
                DType::I32 => pair::<S, i32>(from),
                DType::U32 => pair::<S, u32>(from),
                DType::I64 => pair::<S, i64>(from),
                DType::U64 => pair::<S, u64>(from),
                DType::F16 => pair::<S, f16>(from),
                DType::BF16 => pair::<S, bf16>(from),
                DType::F32 => pair::<S, f32>(from),
                DType::F64 => pair::<S, f64>(from),
            }
        }
        match from_dtype {
            DType::U8 => source::<u8>(from, to_dtype),
            DType::I32 => source::<i32>(from, to_dtype),
            DType::U32 => source::<u32>(from, to_dtype),
            DType::I64 => source::<i64>(from, to_dtype),
            DType::U64 => source::<u64>(from, to_dtype),
            DType::F16 => source::<f16>(from, to_dtype),
            DType::BF16 => source::<bf16>(from, to_dtype),
            DType::F32 => source::<f32>(from, to_dtype),
            DType::F64 => source::<f64>(from, to_dtype),
        }
    }

    fn check(from: &[u8]) {
        for &source in DType::ALL {
            let whole = from.len() - from.len() % usize::try_from(source.bytes()).unwrap();
            for &target in DType::ALL {
                let from = &from[..whole];
                let len = from.len() as u64 / source.bytes() * target.bytes();
                let mut to = vec![0xAA; usize::try_from(len).unwrap()];
                convert_host(from, source, &mut to, target).unwrap();
                let expected = if source == target { from.to_vec() } else { exactly(from, source, target) };
                assert_eq!(to, expected, "{source} to {target} of {from:?}");
            }
        }
    }

    #[test]
    fn every_pattern_of_16_bits_converts_as_the_exact_form_does() {
        check(&(0..=u16::MAX).flat_map(u16::to_le_bytes).collect::<Vec<u8>>());
    }

    proptest! {
        #[test]
        fn any_bits_convert_as_the_exact_form_does(words in prop::collection::vec(any::<u64>(), 0..20)) {
            check(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
        }

        #[test]
        fn numbers_that_programs_have_convert_as_the_exact_form_does(
            floats in prop::collection::vec(any::<f32>(), 0..20), doubles in prop::collection::vec(any::<f64>(), 0..20),
            integers in prop::collection::vec((any::<i64>(), 0u32..64), 0..20),
        ) {
            check(&floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<u8>>());
            check(&doubles.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<u8>>());
            check(&integers.iter().flat_map(|(bits, shift)| (bits >> shift).to_le_bytes()).collect::<Vec<u8>>());
        }
    }

    #[test]
    fn wrong_lengths_are_refused_and_nothing_is_written() {
        let mut to = [7; 8];
        for (from, to_len) in [(3, 8), (4, 3), (8, 4), (0, 8)] {
            let error = convert_host(&[0; 8][..from], DType::F32, &mut to[..to_len], DType::F64).unwrap_err();
            assert_eq!((error.from_bytes, error.to_bytes), (from as u64, to_len as u64));
        }
        assert_eq!(to, [7; 8]);
        assert!(convert_host(&[], DType::BF16, &mut [], DType::U64).is_ok());
    }
}

//! The dtypes of elements, and the Rust types that have one.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::convert::Number;

macro_rules! bytes_of {
    ($type:ty) => {
        impl Bytes for $type {
            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<Self>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }

            fn write(&self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        }
    };
}

// These have no dtype of their own: they are bits of elements of this size.
bytes_of!(u16);

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal: $type:ty, sums to $sum:ty;)*) => {
        /// The type of the elements of a buffer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// Every dtype.
            pub const ALL: &[DType] = &[$(DType::$variant),*];

            /// Its name, such as `"bf16"`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Size of an element in bytes, which is also its alignment.
            pub const fn bytes(self) -> u64 {
                match self { $(DType::$variant => size_of::<$type>() as u64,)* }
            }

            /// Whether elements are floats.
            pub const fn is_float(self) -> bool {
                match self { $(DType::$variant => <$type as Number>::IS_FLOAT,)* }
            }
        }

        $(
            impl Sealed for $type {}

            impl Element for $type {
                type Sum = $sum;

                const DTYPE: DType = DType::$variant;
            }

            bytes_of!($type);
        )*
    };
}

dtypes! {
    /// 8-bit unsigned integers.
    U8 = "u8": u8, sums to u64;
    /// 32-bit signed integers.
    I32 = "i32": i32, sums to i64;
    /// 32-bit unsigned integers.
    U32 = "u32": u32, sums to u64;
    /// 64-bit signed integers.
    I64 = "i64": i64, sums to i64;
    /// 64-bit unsigned integers.
    U64 = "u64": u64, sums to u64;
    /// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
    F16 = "f16": f16, sums to f32;
    /// The upper half of an `f32`: 8 bits of exponent, 7 of mantissa.
    BF16 = "bf16": bf16, sums to f32;
    /// IEEE 754 binary32.
    F32 = "f32": f32, sums to f32;
    /// IEEE 754 binary64.
    F64 = "f64": f64, sums to f64;
}

impl DType {
    /// The unsigned integers of the same size in place of signed ones: arithmetic that wraps gives
    /// both the same bits.
    pub(crate) const fn unsigned(self) -> DType {
        match self {
            DType::I32 => DType::U32,
            DType::I64 => DType::U64,
            other => other,
        }
    }

    /// The operations for which devices of a compute capability (major, minor) lack instructions,
    /// if any.
    ///
    /// Source: the instruction tables of the PTX ISA (`fma`, `cvt`). The kernels of this crate do
    /// not use these instructions: they compute `f16` and `bf16` as `f32`, and convert `bf16` by
    /// its bits.
    ///
    /// ```
    /// use aquifer::kernels::DType;
    /// assert_eq!(DType::BF16.missing_on((9, 0)), None);
    /// assert!(DType::BF16.missing_on((7, 5)).is_some());
    /// ```
    pub const fn missing_on(self, capability: (u32, u32)) -> Option<&'static str> {
        let number = 10 * capability.0 + capability.1;
        match self {
            DType::F16 if number < 53 => Some("arithmetic on f16, which compute capability 5.3 brought"),
            DType::BF16 if number < 80 => {
                Some("arithmetic on bf16 and conversion to it, which compute capability 8.0 brought")
            }
            DType::BF16 if number < 90 => Some(
                "addition of bf16 and its conversion to and from f64 and integers, which compute capability 9.0 brought",
            ),
            _ => None,
        }
    }
}

/// By its name, such as `bf16`.
impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<DType, UnknownDType> {
        let known = DType::ALL.iter().copied().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| UnknownDType { name: name.to_owned() })
    }
}

/// A name that no dtype has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype {name:?}")]
pub struct UnknownDType {
    name: String,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that has a dtype: the integers and floats that [`DType`] lists, those of 16 bits
/// being those of the crate `half`.
///
/// Sealed: the kernels support no other types.
#[allow(private_bounds, reason = "the bounds are what this crate needs and what seals the trait")]
pub trait Element: Number + Bytes + Sealed + Pod + fmt::Debug + PartialEq + Send + Sync {
    /// The type of a sum of elements; see [`DType::of_sum`].
    type Sum: Element;

    /// Its dtype.
    const DTYPE: DType;
}

pub(crate) trait Sealed {}

/// Elements as devices hold them: little-endian.
pub(crate) trait Bytes: Copy {
    fn read(bytes: &[u8]) -> Self;
    fn write(&self, bytes: &mut [u8]);
}

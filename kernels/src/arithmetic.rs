//! The arithmetic of each dtype, the same as in the device code.

use half::{bf16, f16};

use crate::convert::convert;
use crate::dtype::Element;

/// Types that can be added.
pub(crate) trait Arithmetic: Element {
    fn add(self, other: Self) -> Self;
}

/// Types that `axpy` and `matmul` work on: floats, which are multiplied and added in `Wide`.
pub(crate) trait Float: Arithmetic {
    type Wide: Element;

    /// `a · self + y`, rounded once as `Wide` and then to this type.
    fn axpy(self, a: Self::Wide, y: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty,)*) => {$(
        impl Arithmetic for $type {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    )*};
}

integers!(u8, i32, u32, i64, u64,);

macro_rules! floats {
    ($($type:ty as $wide:ty,)*) => {$(
        impl Arithmetic for $type {
            fn add(self, other: Self) -> Self {
                convert::<$wide, _>(<$wide>::from(self) + <$wide>::from(other))
            }
        }

        impl Float for $type {
            type Wide = $wide;

            fn axpy(self, a: $wide, y: Self) -> Self {
                convert(a.mul_add(<$wide>::from(self), <$wide>::from(y)))
            }
        }
    )*};
}

floats!(f16 as f32, bf16 as f32, f32 as f32, f64 as f64,);

//! `cast`: conversion between dtypes, element by element.
//!
//! | from | to | becomes |
//! | --- | --- | --- |
//! | anything | float | the nearest value, ties to even, rounded once; infinite if that is too large; any NaN the canonical one |
//! | float | integer | the value towards zero, clamped to the integer's range; NaN becomes 0 |
//! | integer | integer | the low bits |
//!
//! These are the rules of Rust's `as`, with the bits of NaN fixed. They are the same on every
//! architecture. Conversions without an instruction ([`DType::missing_on`]) compute with bits; this
//! costs nothing, as memory bounds them.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};
use half::{bf16, f16};

use crate::args::{Args, KernelParam, Ranges};
use crate::convert::convert;
use crate::dtype::{DType, Element};
use crate::error::{KernelError, OperandFault};
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

macro_rules! casts {
    ($($from:ident to $($to:ident)*;)*) => {
        pub(crate) const KERNELS: &[Kernel] = &[$($(
            Kernel::of::<Cast<$from, $to>>(
                concat!("cast_", stringify!($from), "_", stringify!($to)),
                Module::Cast,
                Variant::FromTo(<$from>::DTYPE, <$to>::DTYPE),
            ),
        )*)*];
    };
}

casts! {
    u8 to u32 u64 f16 bf16 f32 f64;
    i32 to u64 f16 bf16 f32 f64;
    u32 to u8 u64 f16 bf16 f32 f64;
    i64 to f16 bf16 f32 f64;
    u64 to u8 u32 f16 bf16 f32 f64;
    f16 to u8 i32 u32 i64 u64 bf16 f32 f64;
    bf16 to u8 i32 u32 i64 u64 f16 f32 f64;
    f32 to u8 i32 u32 i64 u64 f16 bf16 f64;
    f64 to u8 i32 u32 i64 u64 f16 bf16 f32;
}

/// The dtypes of the kernel that converts these. Integers become the low bits of integers: the sign
/// of the target makes no difference, nor does that of a source that is not extended.
fn low_bits(from: DType, to: DType) -> (DType, DType) {
    if from.is_float() || to.is_float() {
        return (from, to);
    }
    (if from.bytes() < to.bytes() { from } else { from.unsigned() }, to.unsigned())
}

/// Arguments: output, input, elements.
#[derive(Debug)]
struct Cast<S, D> {
    to: DevicePtr,
    from: DevicePtr,
    len: u64,
    elements: PhantomData<(S, D)>,
}

impl<S: Element, D: Element> Work for Cast<S, D> {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Cast { to: args.ptr()?, from: args.ptr()?, len: args.u64()?, elements: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.write(self.to, self.len, D::DTYPE.bytes())?.read(self.from, self.len, S::DTYPE.bytes())?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        let larger = S::DTYPE.bytes().max(D::DTYPE.bytes());
        Shape::strided(self.len.div_ceil(16 / larger), processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        host::chunks(self.len, |at, len| {
            let from = host::read::<S>(memory, self.from, at, len)?;
            let to: Vec<D> = from.into_iter().map(convert).collect();
            host::write(memory, self.to, at, &to)
        })
    }
}

impl Kernels {
    /// Enqueues converting every element of `from` to the dtype of `to`, by the rules of Rust's
    /// `as`: to floats the nearest value, from floats to integers towards zero and clamped to the
    /// range, integers to integers by their low bits.
    ///
    /// # Errors
    /// Operands of different lengths, or of the same dtype ([`Stream::copy`] is for that); overlap,
    /// and the errors of every operation ([`Kernels`]).
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let floats = memory.from_slice(&[300.7_f32, -1.0, 2.5], &stream)?;
    /// let mut bytes = memory.alloc::<u8>(3, &stream)?;
    /// memory.kernels()?.cast(&stream, &floats, &mut bytes)?;
    /// assert_eq!(bytes.to_vec(&stream)?, [255, 0, 2]);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[track_caller]
    pub fn cast<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        to: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("cast", stream)?;
        let (from, to) = (check.reads("from", from)?, check.writes("to", to)?);
        if from.dtype() == to.dtype() {
            let expected = DType::ALL.iter().copied().filter(|&dtype| dtype != from.dtype()).collect();
            return Err(check.fault(&to, OperandFault::DType { expected }));
        }
        check.len(&to, from.len())?;
        check.apart(&to, &[&from])?;
        if from.operand.is_empty() {
            return Ok(());
        }
        let (source, target) = low_bits(from.dtype(), to.dtype());
        let access = self.access(stream, check.kernel, &[&from], &[&to])?;
        match KERNELS.iter().find(|kernel| kernel.variant == Variant::FromTo(source, target)) {
            Some(kernel) => access.launch(kernel, vec![to.arg(), from.arg(), KernelArg::U64(from.len())]),
            // Integers of one size have the same bits.
            None => Ok(access.stream().copy(to.operand.ptr(), from.operand.ptr(), from.operand.bytes())?),
        }
    }
}

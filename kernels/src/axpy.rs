//! `axpy`: `y = a · x + y`, element by element.
//!
//! Product and sum are fused: rounded once, together, as `f64` for `f64` and else as `f32`, and
//! then, for `f16` and `bf16`, to those.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};
use half::{bf16, f16};

use crate::args::{Args, KernelParam, Ranges};
use crate::arithmetic::Float;
use crate::convert::convert;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const KERNELS: &[Kernel] =
    &[of::<f16>("axpy_f16"), of::<bf16>("axpy_bf16"), of::<f32>("axpy_f32"), of::<f64>("axpy_f64")];

const fn of<T: Float>(name: &'static str) -> Kernel {
    Kernel::of::<Axpy<T>>(name, Module::Arithmetic, Variant::Of(T::DTYPE))
}

/// Arguments: `y`, `x`, `a` as `f64` for `f64` and else as `f32`, elements.
#[derive(Debug)]
struct Axpy<T> {
    y: DevicePtr,
    x: DevicePtr,
    a: f64,
    len: u64,
    element: PhantomData<T>,
}

impl<T: Float> Work for Axpy<T> {
    const PARAMS: &'static [KernelParam] = match T::DTYPE {
        DType::F64 => &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::F64, KernelParam::U64],
        _ => &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::F32, KernelParam::U64],
    };

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        let (y, x) = (args.ptr()?, args.ptr()?);
        let a = if T::DTYPE == DType::F64 { args.f64()? } else { f64::from(args.f32()?) };
        Ok(Axpy { y, x, a, len: args.u64()?, element: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let size = T::DTYPE.bytes();
        Ok(ranges.write(self.y, self.len, size)?.read(self.x, self.len, size)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.len.div_ceil(16 / T::DTYPE.bytes()), processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        // It was widened from this type, so nothing is lost.
        let a: T::Wide = convert(self.a);
        host::chunks(self.len, |at, len| {
            let mut y: Vec<T> = host::read(memory, self.y, at, len)?;
            let x = host::read::<T>(memory, self.x, at, len)?;
            y.iter_mut().zip(x).for_each(|(y, x)| *y = x.axpy(a, *y));
            host::write(memory, self.y, at, &y)
        })
    }
}

impl Kernels {
    /// Enqueues `y = a · x + y`, element by element, on floats. `a` is rounded to `f32`, unless the
    /// elements are `f64`; product and sum are fused: rounded once, together, in that type, and
    /// then to the elements'.
    ///
    /// `x` and `y` may be the same memory, but not overlap otherwise.
    ///
    /// # Errors
    /// Operands of different dtypes or lengths, or of integers; overlap, and the errors of every
    /// operation ([`Kernels`]).
    #[track_caller]
    pub fn axpy<'a>(
        &'a self,
        stream: &'a Stream,
        a: f64,
        x: impl Into<Operand<'a>>,
        y: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("axpy", stream)?;
        let (x, y) = (check.reads("x", x)?, check.writes("y", y)?);
        let kernel = check.kernel(KERNELS, &x, x.dtype())?;
        check.dtype(&y, x.dtype())?;
        check.len(&y, x.len())?;
        check.apart_or_same(&y, &[&x])?;
        if x.operand.is_empty() {
            return Ok(());
        }
        let a = if x.dtype() == DType::F64 { KernelArg::F64(a) } else { KernelArg::F32(convert(a)) };
        let args = vec![y.arg(), x.arg(), a, KernelArg::U64(x.len())];
        self.access(stream, check.kernel, &[&x], &[&y])?.launch(kernel, args)
    }
}

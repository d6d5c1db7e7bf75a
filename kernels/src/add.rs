//! `add`: sums, element by element.
//!
//! Integers wrap. Floats are rounded once to the nearest value, ties to even; `f16` and `bf16` are
//! added as `f32`, which is wide enough for a single rounding.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};
use half::{bf16, f16};

use crate::args::{Args, KernelParam, Ranges};
use crate::arithmetic::Arithmetic;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const KERNELS: &[Kernel] = &[
    of::<u8>("add_u8"),
    of::<u32>("add_u32"),
    of::<u64>("add_u64"),
    of::<f16>("add_f16"),
    of::<bf16>("add_bf16"),
    of::<f32>("add_f32"),
    of::<f64>("add_f64"),
];

const fn of<T: Arithmetic>(name: &'static str) -> Kernel {
    Kernel::of::<Add<T>>(name, Module::Arithmetic, Variant::Of(T::DTYPE))
}

/// Arguments: output, both inputs, elements.
#[derive(Debug)]
struct Add<T> {
    to: DevicePtr,
    a: DevicePtr,
    b: DevicePtr,
    len: u64,
    element: PhantomData<T>,
}

impl<T: Arithmetic> Work for Add<T> {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::Ptr, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Add { to: args.ptr()?, a: args.ptr()?, b: args.ptr()?, len: args.u64()?, element: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let size = T::DTYPE.bytes();
        Ok(ranges.write(self.to, self.len, size)?.read(self.a, self.len, size)?.read(self.b, self.len, size)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.len.div_ceil(16 / T::DTYPE.bytes()), processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        host::chunks(self.len, |at, len| {
            let mut sums: Vec<T> = host::read(memory, self.a, at, len)?;
            let others = host::read::<T>(memory, self.b, at, len)?;
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum = sum.add(other));
            host::write(memory, self.to, at, &sums)
        })
    }
}

impl Kernels {
    /// Enqueues `to = a + b`, element by element: integers wrap, floats are rounded once.
    ///
    /// `to` may be one of the inputs, but not overlap one otherwise.
    ///
    /// # Errors
    /// Operands of different dtypes or lengths, overlap, and the errors of every operation
    /// ([`Kernels`]).
    #[track_caller]
    pub fn add<'a>(
        &'a self,
        stream: &'a Stream,
        a: impl Into<Operand<'a>>,
        b: impl Into<Operand<'a>>,
        to: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("add", stream)?;
        let (a, b, to) = (check.reads("a", a)?, check.reads("b", b)?, check.writes("to", to)?);
        let kernel = check.kernel(KERNELS, &a, a.dtype().unsigned())?;
        for other in [&b, &to] {
            check.dtype(other, a.dtype())?;
            check.len(other, a.len())?;
        }
        check.apart_or_same(&to, &[&a, &b])?;
        if a.operand.is_empty() {
            return Ok(());
        }
        let args = vec![to.arg(), a.arg(), b.arg(), KernelArg::U64(a.len())];
        self.access(stream, check.kernel, &[&a, &b], &[&to])?.launch(kernel, args)
    }
}

//! `matmul`: products of matrices, tiled.
//!
//! Elements are multiplied and accumulated as `f32`, by fused multiply-add in the order of `k`, and
//! rounded to the dtype of the operands at the end: `c[i][j] = fma(a[i][k], b[k][j], c[i][j])` from
//! 0 on. It uses no tensor cores and is slower than a BLAS; its purpose is to be correct and to
//! load a device with arithmetic.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};
use half::{bf16, f16};

use crate::args::{Args, KernelParam, Ranges, refuse};
use crate::convert::convert;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const KERNELS: &[Kernel] = &[of::<f16>("matmul_f16"), of::<bf16>("matmul_bf16"), of::<f32>("matmul_f32")];

const fn of<T: Element>(name: &'static str) -> Kernel {
    Kernel::of::<Matmul<T>>(name, Module::Matmul, Variant::Of(T::DTYPE))
}

/// Rows and columns of the product that a block computes at a time.
const SIDE: u64 = 64;

/// Arguments: `c`, `a`, `b`, and `m`, `k`, `n`: `a` is `m` by `k`, `b` is `k` by `n`.
#[derive(Debug)]
struct Matmul<T> {
    c: DevicePtr,
    a: DevicePtr,
    b: DevicePtr,
    m: u64,
    k: u64,
    n: u64,
    element: PhantomData<T>,
}

impl<T: Element> Work for Matmul<T> {
    const PARAMS: &'static [KernelParam] =
        &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::Ptr, KernelParam::U64, KernelParam::U64, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        let (c, a, b) = (args.ptr()?, args.ptr()?, args.ptr()?);
        Ok(Matmul { c, a, b, m: args.u64()?, k: args.u64()?, n: args.u64()?, element: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let size = T::DTYPE.bytes();
        let len = |rows: u64, columns: u64| {
            rows.checked_mul(columns).ok_or_else(|| refuse("matmul", "rows times columns overflow"))
        };
        let (c, a, b) = (len(self.m, self.n)?, len(self.m, self.k)?, len(self.k, self.n)?);
        Ok(ranges.write(self.c, c, size)?.read(self.a, a, size)?.read(self.b, b, size)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        let tiles = self.m.div_ceil(SIDE).saturating_mul(self.n.div_ceil(SIDE));
        let most = u64::from(processors.max(1)) * 16;
        Shape::new([u32::try_from(tiles.clamp(1, most)).unwrap_or(u32::MAX), 1, 1], [256, 1, 1])
    }

    fn operations(&self) -> u64 {
        self.m.saturating_mul(self.n).saturating_mul(self.k).saturating_mul(2)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let (k, n) = (host::small(self.k), host::small(self.n));
        if n == 0 || self.m == 0 {
            return Ok(());
        }
        let b: Vec<f32> = widened::<T>(memory, self.b, 0, n.saturating_mul(k))?;
        for row in 0..self.m {
            let a = widened::<T>(memory, self.a, row * self.k, k)?;
            let mut sums = host::filled(n, 0f32)?;
            for (a, b) in a.iter().zip(b.chunks_exact(n)) {
                sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum = a.mul_add(b, *sum));
            }
            let c: Vec<T> = host::collected(sums.into_iter().map(convert))?;
            host::write(memory, self.c, row * self.n, &c)?;
        }
        Ok(())
    }
}

fn widened<T: Element>(memory: &dyn KernelMemory, from: DevicePtr, index: u64, len: usize) -> Result<Vec<f32>> {
    host::collected(host::read::<T>(memory, from, index, len)?.into_iter().map(convert))
}

impl Kernels {
    /// Enqueues `c = a · b`. `a` has `m` rows of `k` elements, `b` has `k` rows of `n`, `c` has `m`
    /// rows of `n`, each dense and row by row. Elements are `f32`, `f16` or `bf16`; they are
    /// multiplied and accumulated as `f32`, in the order of `k`, and rounded at the end.
    ///
    /// # Errors
    /// Operands of different or other dtypes, other lengths than `m`, `k` and `n` say, overlap, and
    /// the errors of every operation ([`Kernels`]).
    #[track_caller]
    pub fn matmul<'a>(
        &'a self,
        stream: &'a Stream,
        a: impl Into<Operand<'a>>,
        b: impl Into<Operand<'a>>,
        c: impl Into<Target<'a>>,
        [m, k, n]: [u64; 3],
    ) -> Result<(), KernelError> {
        let check = self.check("matmul", stream)?;
        let (a, b, c) = (check.reads("a", a)?, check.reads("b", b)?, check.writes("c", c)?);
        let kernel = check.kernel(KERNELS, &a, a.dtype())?;
        check.dtype(&b, a.dtype())?;
        check.dtype(&c, a.dtype())?;
        check.len(&a, check.product("m and k", &[m, k])?)?;
        check.len(&b, check.product("k and n", &[k, n])?)?;
        check.len(&c, check.product("m and n", &[m, n])?)?;
        check.apart(&c, &[&a, &b])?;
        if c.operand.is_empty() {
            return Ok(());
        }
        let args = vec![c.arg(), a.arg(), b.arg(), KernelArg::U64(m), KernelArg::U64(k), KernelArg::U64(n)];
        self.access(stream, check.kernel, &[&a, &b], &[&c])?.launch(kernel, args)
    }
}

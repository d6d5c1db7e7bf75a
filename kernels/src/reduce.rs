//! `reduce_sum`: the sum of all elements, with the same bits on every device and in every run.
//!
//! Floats are accumulated as `f64` and rounded once at the end, to `f32` for `f16`, `bf16` and
//! `f32`. Integers are accumulated as 64 bits and wrap. The order is fixed by the number of
//! elements `n` alone:
//!
//! 1. `B = min(1024, ⌈n / 4096⌉)` blocks, at least one, of 256 threads. Elements are taken in
//!    vectors of 16 bytes; thread `t` of all takes vectors `t`, `t + 256 B`, … and adds element `e`
//!    of each to its accumulator `e mod 4`. Elements after the last whole vector are those of the
//!    next one. A thread's sum is `(a0 + a1) + (a2 + a3)`, a block's the tree `v[t] += v[t + s]`
//!    for `s = 128, 64, …, 1`.
//! 2. One block adds the blocks' sums: thread `t` those of blocks `t`, `t + 256`, …, then the same
//!    tree.
//!
//! So at most `d = ⌈n / (512 B)⌉ + 22` additions (half the first term, unless elements are of 8
//! bytes) are between an element and the result, and with `u = 2^-53`
//!
//! ```text
//! |sum - exact| ≤ d · u / (1 - d · u) · Σ |x|
//! ```
//!
//! (Source: Nicholas J. Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2),
//! before the sum is rounded to `f32`, which costs at most 2^-24 of it.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};
use half::{bf16, f16};

use crate::args::{Args, KernelParam, Ranges};
use crate::arithmetic::Arithmetic;
use crate::convert::convert;
use crate::dtype::{DType, Element};
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, THREADS, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const SUMS: &[Kernel] = &[
    sum_of::<u8, u64>("reduce_sum_u8"),
    sum_of::<i32, u64>("reduce_sum_i32"),
    sum_of::<u32, u64>("reduce_sum_u32"),
    sum_of::<u64, u64>("reduce_sum_u64"),
    sum_of::<f16, f64>("reduce_sum_f16"),
    sum_of::<bf16, f64>("reduce_sum_bf16"),
    sum_of::<f32, f64>("reduce_sum_f32"),
    sum_of::<f64, f64>("reduce_sum_f64"),
];

/// By the dtype of the result.
pub(crate) const FINISHES: &[Kernel] = &[
    finish_of::<u64, u64>("reduce_finish_u64"),
    finish_of::<f64, f64>("reduce_finish_f64"),
    finish_of::<f64, f32>("reduce_finish_f32"),
];

const fn sum_of<T: Element, A: Arithmetic>(name: &'static str) -> Kernel {
    Kernel::of::<Sum<T, A>>(name, Module::Reduce, Variant::Of(T::DTYPE))
}

const fn finish_of<A: Arithmetic, D: Element>(name: &'static str) -> Kernel {
    Kernel::of::<Finish<A, D>>(name, Module::Reduce, Variant::Of(D::DTYPE))
}

/// The most blocks of the first pass.
const BLOCKS_MAX: u64 = Kernels::SUM_SCRATCH_LEN as u64;
const ELEMENTS_PER_BLOCK: u64 = 4096;
const BLOCK: usize = THREADS as usize;
const ACCUMULATORS: usize = 4;

fn blocks(len: u64) -> u64 {
    len.div_ceil(ELEMENTS_PER_BLOCK).clamp(1, BLOCKS_MAX)
}

/// The sum over a block's threads.
fn tree<A: Arithmetic>(mut values: [A; BLOCK]) -> A {
    let mut step = BLOCK / 2;
    while step > 0 {
        for thread in 0..step {
            values[thread] = values[thread].add(values[thread + step]);
        }
        step /= 2;
    }
    values[0]
}

/// Arguments: input, elements, the blocks' sums.
#[derive(Debug)]
struct Sum<T, A> {
    from: DevicePtr,
    len: u64,
    partial: DevicePtr,
    elements: PhantomData<(T, A)>,
}

impl<T: Element, A: Arithmetic> Work for Sum<T, A> {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::Ptr];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Sum { from: args.ptr()?, len: args.u64()?, partial: args.ptr()?, elements: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let partial = ranges.write(self.partial, blocks(self.len), A::DTYPE.bytes())?;
        Ok(partial.read(self.from, self.len, T::DTYPE.bytes())?.done())
    }

    fn shape(&self, _: u32) -> Shape {
        // Not the device's multiprocessors: the order would depend on them.
        Shape::new([u32::try_from(blocks(self.len)).unwrap_or(u32::MAX), 1, 1], [THREADS, 1, 1])
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let vector = 16 / size_of::<T>();
        let zero: A = convert(0u8);
        let blocks = host::small(blocks(self.len));
        let mut threads = vec![[zero; ACCUMULATORS]; blocks * BLOCK];
        // All pieces but the last have whole vectors.
        let mut next = 0;
        host::chunks(self.len, |at, len| {
            for elements in host::read::<T>(memory, self.from, at, len)?.chunks(vector) {
                let accumulators = &mut threads[next];
                next = (next + 1) % (blocks * BLOCK);
                for (index, &element) in elements.iter().enumerate() {
                    let sum = &mut accumulators[index % ACCUMULATORS];
                    *sum = sum.add(convert(element));
                }
            }
            Ok(())
        })?;
        let sums = threads.chunks_exact(BLOCK).map(|block| {
            let mut values = [zero; BLOCK];
            for (value, [a, b, c, d]) in values.iter_mut().zip(block) {
                *value = a.add(*b).add(c.add(*d));
            }
            tree(values)
        });
        host::write(memory, self.partial, 0, &sums.collect::<Vec<A>>())
    }
}

/// Arguments: the blocks' sums, their number, output.
#[derive(Debug)]
struct Finish<A, D> {
    partial: DevicePtr,
    blocks: u64,
    to: DevicePtr,
    elements: PhantomData<(A, D)>,
}

impl<A: Arithmetic, D: Element> Work for Finish<A, D> {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::Ptr];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Finish { partial: args.ptr()?, blocks: args.u64()?, to: args.ptr()?, elements: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.write(self.to, 1, D::DTYPE.bytes())?.read(self.partial, self.blocks, A::DTYPE.bytes())?.done())
    }

    fn shape(&self, _: u32) -> Shape {
        Shape::new([1; 3], [THREADS, 1, 1])
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let mut values = [convert::<u8, A>(0); BLOCK];
        host::chunks(self.blocks, |at, len| {
            // All pieces but the last have a multiple of a block's threads.
            for (index, sum) in host::read::<A>(memory, self.partial, at, len)?.into_iter().enumerate() {
                let value = &mut values[index % BLOCK];
                *value = value.add(sum);
            }
            Ok(())
        })?;
        host::write(memory, self.to, 0, &[convert::<A, D>(tree(values))])
    }
}

impl DType {
    /// The dtype of the sum of elements; see [`Kernels::reduce_sum`].
    pub const fn of_sum(self) -> DType {
        match self {
            DType::F16 | DType::BF16 | DType::F32 => DType::F32,
            DType::F64 => DType::F64,
            DType::I32 | DType::I64 => DType::I64,
            DType::U8 | DType::U32 | DType::U64 => DType::U64,
        }
    }
}

impl Kernels {
    /// Elements of the scratch memory that [`Kernels::reduce_sum`] needs.
    pub const SUM_SCRATCH_LEN: usize = 1024;

    /// Enqueues summing all elements of `from` into `to`, one element: of `f32` for `f16`, `bf16`
    /// and `f32`, of `f64` for `f64`, of `i64` for signed and of `u64` for unsigned integers.
    ///
    /// The result depends on the elements alone, not on the device or the run. Floats are
    /// accumulated as `f64` and rounded once at the end: the sum of `n` elements is within `d / (1
    /// - d) · Σ|x|` of the exact one with `d = (n / 2^19 + 31) · 2^-53`, and then within 2^-24 of
    /// itself if it is rounded to `f32`. Integers wrap. The sum of no elements is 0.
    ///
    /// `scratch` needs [`Kernels::SUM_SCRATCH_LEN`] elements. Sums that share it wait for each
    /// other.
    ///
    /// # Errors
    /// A wrong dtype or length of `to`, too little scratch memory, overlap, and the errors of every
    /// operation ([`Kernels`]).
    ///
    /// ```
    /// use aquifer::kernels::Kernels;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let tenths = memory.from_slice(&[0.1_f32; 1_000_000], &stream)?;
    /// let mut scratch = memory.alloc::<u64>(Kernels::SUM_SCRATCH_LEN, &stream)?;
    /// let mut sum = memory.alloc::<f32>(1, &stream)?;
    /// memory.kernels()?.reduce_sum(&stream, &tenths, &mut scratch, &mut sum)?;
    /// assert_eq!(sum.item(&stream)?, 100_000.0);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_sum<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        scratch: impl Into<Target<'a>>,
        to: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("reduce_sum", stream)?;
        let from = check.reads("from", from)?;
        let (scratch, to) = (check.writes("scratch", scratch)?, check.writes("to", to)?);
        // Signed integers of 64 bits wrap as unsigned ones do; shorter ones are extended by their
        // sign.
        let of = if from.dtype() == DType::I64 { DType::U64 } else { from.dtype() };
        let sum = check.kernel(SUMS, &from, of)?;
        let dtype = from.dtype().of_sum();
        check.dtype(&to, dtype)?;
        check.len(&to, 1)?;
        check.dtype(&scratch, DType::U64)?;
        check.at_least(&scratch, Kernels::SUM_SCRATCH_LEN as u64)?;
        check.apart(&to, &[&from, &scratch])?;
        check.apart(&scratch, &[&from])?;
        let finish = check.kernel(FINISHES, &to, dtype.unsigned())?;
        let access = self.access(stream, check.kernel, &[&from], &[&scratch, &to])?;
        access.launch(sum, vec![from.arg(), KernelArg::U64(from.len()), scratch.arg()])?;
        access.launch(finish, vec![scratch.arg(), KernelArg::U64(blocks(from.len())), to.arg()])
    }
}

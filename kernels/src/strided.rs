//! `gather` and `scatter`: elements with gaps between them, from and to dense memory.

use std::marker::PhantomData;

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};

use crate::args::{Args, KernelParam, Ranges, refuse};
use crate::dtype::Bytes;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const GATHERS: &[Kernel] =
    &[gather::<u8>("gather_8"), gather::<u16>("gather_16"), gather::<u32>("gather_32"), gather::<u64>("gather_64")];

pub(crate) const SCATTERS: &[Kernel] = &[
    scatter::<u8>("scatter_8"),
    scatter::<u16>("scatter_16"),
    scatter::<u32>("scatter_32"),
    scatter::<u64>("scatter_64"),
];

const fn gather<T: Bytes>(name: &'static str) -> Kernel {
    Kernel::of::<Move<T, true>>(name, Module::Layout, Variant::Bytes(size_of::<T>() as u64))
}

const fn scatter<T: Bytes>(name: &'static str) -> Kernel {
    Kernel::of::<Move<T, false>>(name, Module::Layout, Variant::Bytes(size_of::<T>() as u64))
}

/// The most dimensions.
const DIMENSIONS: usize = 4;

/// A layout of elements: extents and strides of up to four dimensions, outermost first, strides in
/// elements.
///
/// ```
/// use aquifer_kernels::Strided;
/// // Columns 0..3 of the rows 0..2 of a matrix with 10 columns.
/// let layout = Strided::new(&[2, 3], &[10, 1]).unwrap();
/// assert_eq!((layout.len(), layout.reach()), (6, 13));
/// assert!(Strided::new(&[1; 5], &[1; 5]).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    extents: [u64; DIMENSIONS],
    strides: [u64; DIMENSIONS],
}

impl Strided {
    /// A layout with these extents and strides. `None` if there are more than four dimensions, or
    /// strides are missing, or numbers overflow.
    pub fn new(extents: &[u64], strides: &[u64]) -> Option<Strided> {
        let missing = DIMENSIONS.checked_sub(extents.len())?;
        if extents.len() != strides.len() {
            return None;
        }
        let mut layout = Strided { extents: [1; DIMENSIONS], strides: [0; DIMENSIONS] };
        layout.extents[missing..].copy_from_slice(extents);
        layout.strides[missing..].copy_from_slice(strides);
        layout.checked()
    }

    /// The layout, if no number of it overflows.
    fn checked(self) -> Option<Strided> {
        self.extents.iter().try_fold(1u64, |len, &extent| len.checked_mul(extent.max(1)))?;
        let mut reach = 1u64;
        for (extent, stride) in self.dimensions() {
            reach = reach.checked_add(extent.saturating_sub(1).checked_mul(stride)?)?;
        }
        Some(self)
    }

    fn dimensions(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> {
        self.extents.into_iter().zip(self.strides)
    }

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.extents.iter().product()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The distance from its first to its last element, in elements and including both; 0 if there
    /// are none.
    pub fn reach(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        1 + self.dimensions().map(|(extent, stride)| (extent - 1) * stride).sum::<u64>()
    }

    /// Whether all elements have different places, by [`Strided::are_distinct`].
    pub fn is_distinct(&self) -> bool {
        let mut dimensions: Vec<_> = self.dimensions().collect();
        dimensions.sort_unstable_by_key(|&(_, stride)| stride);
        self.is_empty() || Strided::are_distinct(dimensions)
    }

    /// Whether all elements of these dimensions, extents and strides by rising stride, have
    /// different places. The test is quick: each stride must exceed the reach of the smaller ones.
    /// It is `false` for some unusual interleaved layouts with different places, and for more if
    /// the order is another one, but never `true` if two elements have the same place.
    ///
    /// ```
    /// use aquifer_kernels::Strided;
    /// assert!(Strided::are_distinct([(3, 1), (2, 10)]));
    /// assert!(!Strided::are_distinct([(3, 1), (2, 2)]), "the third of the first row is the first of the second one");
    /// ```
    pub fn are_distinct(by_rising_stride: impl IntoIterator<Item = (u64, u64)>) -> bool {
        let mut reach = 0u64;
        by_rising_stride.into_iter().filter(|&(extent, _)| extent > 1).all(|(extent, stride)| {
            let passes = stride > reach;
            // No stride exceeds the reach if it overflows.
            reach = reach.saturating_add((extent - 1).saturating_mul(stride));
            passes
        })
    }

    /// Calls `row` with the dense index and the place of each innermost row's first element.
    fn rows(&self, mut row: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
        let [outer, middle, inner, along] = self.extents;
        let mut index = 0;
        for place in (0..outer).flat_map(|i| (0..middle).flat_map(move |j| (0..inner).map(move |k| [i, j, k]))) {
            let at = place.iter().zip(self.strides).map(|(&at, stride)| at * stride).sum();
            row(index, at)?;
            index += along;
        }
        Ok(())
    }

    fn args(&self) -> impl Iterator<Item = KernelArg> {
        self.extents.into_iter().chain(self.strides).map(KernelArg::U64)
    }
}

/// Arguments: output, input, extents, strides. The strided side is the input of a gather and the
/// output of a scatter.
#[derive(Debug)]
struct Move<T, const GATHER: bool> {
    to: DevicePtr,
    from: DevicePtr,
    layout: Strided,
    element: PhantomData<T>,
}

impl<T: Bytes, const GATHER: bool> Work for Move<T, GATHER> {
    const PARAMS: &'static [KernelParam] = &[
        KernelParam::Ptr,
        KernelParam::Ptr,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
        KernelParam::U64,
    ];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        let (to, from) = (args.ptr()?, args.ptr()?);
        let extents = [args.u64()?, args.u64()?, args.u64()?, args.u64()?];
        let strides = [args.u64()?, args.u64()?, args.u64()?, args.u64()?];
        let layout = Strided { extents, strides }.checked();
        let layout = layout.ok_or_else(|| refuse("gather or scatter", "extents and strides overflow"))?;
        Ok(Move { to, from, layout, element: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let (len, reach, size) = (self.layout.len(), self.layout.reach(), size_of::<T>() as u64);
        let (to, from) = if GATHER { (len, reach) } else { (reach, len) };
        Ok(ranges.write(self.to, to, size)?.read(self.from, from, size)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.layout.len(), processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let (along, stride) = (self.layout.extents[DIMENSIONS - 1], self.layout.strides[DIMENSIONS - 1]);
        if self.layout.is_empty() {
            return Ok(());
        }
        self.layout.rows(|index, at| {
            if stride == 1 {
                let (dense, strided) = if GATHER { (self.to, self.from) } else { (self.from, self.to) };
                return copy::<T>(memory, (dense, index), (strided, at), along, GATHER);
            }
            host::chunks(along, |start, len| match GATHER {
                true => {
                    let place = |step: usize| at + (start + step as u64) * stride;
                    let row: Result<Vec<T>> =
                        (0..len).map(|step| Ok(host::read::<T>(memory, self.from, place(step), 1)?[0])).collect();
                    host::write(memory, self.to, index + start, &row?)
                }
                false => {
                    let row: Vec<T> = host::read(memory, self.from, index + start, len)?;
                    let mut places = (start..).map(|step| at + step * stride);
                    row.iter().zip(&mut places).try_for_each(|(element, place)| {
                        host::write(memory, self.to, place, std::slice::from_ref(element))
                    })
                }
            })
        })
    }
}

/// Copies a run between the dense side and the strided one, each given by its memory and an index
/// there.
fn copy<T: Bytes>(
    memory: &mut dyn KernelMemory,
    dense: (DevicePtr, u64),
    strided: (DevicePtr, u64),
    len: u64,
    gather: bool,
) -> Result<()> {
    let (to, from) = if gather { (dense, strided) } else { (strided, dense) };
    host::chunks(len, |at, len| {
        let elements: Vec<T> = host::read(memory, from.0, from.1 + at, len)?;
        host::write(memory, to.0, to.1 + at, &elements)
    })
}

impl Kernels {
    /// Enqueues a gather: `to`, which is dense, becomes the elements of `from` at the places of
    /// `layout`, in order. A stride of 0 repeats elements.
    ///
    /// # Errors
    /// Operands of different dtypes, a `to` of another length than the layout, a `from` shorter
    /// than its reach, overlap, and the errors of every operation ([`Kernels`]).
    #[track_caller]
    pub fn gather<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        layout: &Strided,
        to: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("gather", stream)?;
        let (from, to) = (check.reads("from", from)?, check.writes("to", to)?);
        check.dtype(&to, from.dtype())?;
        check.len(&to, layout.len())?;
        check.at_least(&from, layout.reach())?;
        check.apart(&to, &[&from])?;
        if layout.is_empty() {
            return Ok(());
        }
        let kernel = check.sized(GATHERS, &from)?;
        let args = [to.arg(), from.arg()].into_iter().chain(layout.args()).collect();
        self.access(stream, check.kernel, &[&from], &[&to])?.launch(kernel, args)
    }

    /// Enqueues a scatter: the elements of `from`, which is dense, are written in order to the
    /// places of `layout` in `to`. Other elements stay.
    ///
    /// # Errors
    /// Operands of different dtypes, a `from` of another length than the layout, a `to` shorter
    /// than its reach, a layout in which two elements have the same place, overlap, and the errors
    /// of every operation ([`Kernels`]).
    #[track_caller]
    pub fn scatter<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        to: impl Into<Target<'a>>,
        layout: &Strided,
    ) -> Result<(), KernelError> {
        let check = self.check("scatter", stream)?;
        let (from, to) = (check.reads("from", from)?, check.writes("to", to)?);
        check.dtype(&to, from.dtype())?;
        check.len(&from, layout.len())?;
        check.at_least(&to, layout.reach())?;
        check.apart(&to, &[&from])?;
        if !layout.is_distinct() {
            return Err(check.argument("layout", "has two elements at one place, and which one stays would be chance"));
        }
        if layout.is_empty() {
            return Ok(());
        }
        let kernel = check.sized(SCATTERS, &from)?;
        let args = [to.arg(), from.arg()].into_iter().chain(layout.args()).collect();
        self.access(stream, check.kernel, &[&from], &[&to])?.launch(kernel, args)
    }
}

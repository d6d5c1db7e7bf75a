//! `transpose`: the elements of a matrix with rows and columns exchanged.

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

pub(crate) const KERNELS: &[Kernel] =
    &[of::<u8>("transpose_8"), of::<u16>("transpose_16"), of::<u32>("transpose_32"), of::<u64>("transpose_64")];

const fn of<T: Bytes>(name: &'static str) -> Kernel {
    Kernel::of::<Transpose<T>>(name, Module::Layout, Variant::Bytes(size_of::<T>() as u64))
}

/// Rows and columns of the tiles that a block moves.
const TILE: u64 = 32;

/// Arguments: output, input, rows and columns of the input.
#[derive(Debug)]
struct Transpose<T> {
    to: DevicePtr,
    from: DevicePtr,
    rows: u64,
    columns: u64,
    element: PhantomData<T>,
}

impl<T: Bytes> Work for Transpose<T> {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::Ptr, KernelParam::U64, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        let (to, from) = (args.ptr()?, args.ptr()?);
        Ok(Transpose { to, from, rows: args.u64()?, columns: args.u64()?, element: PhantomData })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        let (len, size) = (self.rows.checked_mul(self.columns), size_of::<T>() as u64);
        let len = len.ok_or_else(|| refuse("transpose", "rows times columns overflow"))?;
        Ok(ranges.write(self.to, len, size)?.read(self.from, len, size)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        let tiles = self.rows.div_ceil(TILE).saturating_mul(self.columns.div_ceil(TILE));
        let most = u64::from(processors.max(1)) * 64;
        Shape::new([u32::try_from(tiles.clamp(1, most)).unwrap_or(u32::MAX), 1, 1], [32, 8, 1])
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        // In tiles, so that neither side is touched element by element.
        const SIDE: usize = 128;
        if self.columns == 0 {
            return Ok(());
        }
        for row in (0..self.rows).step_by(SIDE) {
            for column in (0..self.columns).step_by(SIDE) {
                let across = SIDE.min(host::small(self.columns - column));
                let mut tile = Vec::with_capacity(SIDE);
                for line in (row..self.rows).take(SIDE) {
                    tile.push(host::read::<T>(memory, self.from, line * self.columns + column, across)?);
                }
                for line in 0..across {
                    let elements: Vec<T> = tile.iter().map(|row| row[line]).collect();
                    host::write(memory, self.to, (column + line as u64) * self.rows + row, &elements)?;
                }
            }
        }
        Ok(())
    }
}

impl Kernels {
    /// Enqueues exchanging rows and columns: `to[c][r] = from[r][c]`. `from` has `rows` rows of
    /// `columns` elements, one after the other; `to` the other way round.
    ///
    /// # Errors
    /// Operands of different dtypes or of other lengths than `rows · columns`, overlap, and the
    /// errors of every operation ([`Kernels`]).
    #[track_caller]
    pub fn transpose<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        to: impl Into<Target<'a>>,
        rows: u64,
        columns: u64,
    ) -> Result<(), KernelError> {
        let check = self.check("transpose", stream)?;
        let (from, to) = (check.reads("from", from)?, check.writes("to", to)?);
        let len = check.product("rows and columns", &[rows, columns])?;
        check.dtype(&to, from.dtype())?;
        check.len(&from, len)?;
        check.len(&to, len)?;
        check.apart(&to, &[&from])?;
        if len == 0 {
            return Ok(());
        }
        let kernel = check.sized(KERNELS, &from)?;
        let args = vec![to.arg(), from.arg(), KernelArg::U64(rows), KernelArg::U64(columns)];
        self.access(stream, check.kernel, &[&from], &[&to])?.launch(kernel, args)
    }
}

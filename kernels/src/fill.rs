//! `fill`: memory of one value.
//!
//! The kernel fills bytes: the byte at address `a` becomes byte `a mod 8` of a pattern of 8 bytes. A value whose size divides 8,
//! repeated, is such a pattern wherever a multiple of its size begins; so one kernel serves all dtypes.

use aquifer_device::{Access, DevicePtr, KernelMemory, Result};

use crate::args::{Args, Param, Ranges};
use crate::host::{self, CHUNK};
use crate::kernel::{Shape, Work};

/// Arguments: first byte, length in bytes, pattern.
#[derive(Debug)]
pub(crate) struct Fill {
    to: DevicePtr,
    bytes: u64,
    pattern: u64,
}

impl Work for Fill {
    const PARAMS: &'static [Param] = &[Param::Ptr, Param::U64, Param::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Fill { to: args.ptr()?, bytes: args.u64()?, pattern: args.u64()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<Access>> {
        Ok(ranges.write(self.to, self.bytes, 1)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.bytes / 16, processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let first = (self.to.0 % 8) as u32;
        let pattern = self.pattern.rotate_right(8 * first).to_le_bytes();
        let longest: Vec<u8> = pattern.iter().copied().cycle().take(CHUNK).collect();
        host::chunks(self.bytes, CHUNK, |at, len| memory.write(self.to.offset(at), &longest[..len]))
    }
}

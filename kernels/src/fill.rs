//! `fill`: sets memory to one value.
//!
//! The kernel fills bytes: the byte at address `a` becomes byte `a mod 8` of a pattern of 8 bytes.
//! A value whose size divides 8, repeated, is such a pattern wherever a multiple of its size
//! begins; so one kernel serves all dtypes.

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};

use crate::args::{Args, KernelParam, Ranges};
use crate::dtype::Element;
use crate::error::KernelError;
use crate::host::{self, CHUNK};
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::Target;

pub(crate) const FILL: Kernel = Kernel::of::<Fill>("fill", Module::Bytes, Variant::Any);

/// Arguments: first byte, length in bytes, pattern.
#[derive(Debug)]
struct Fill {
    to: DevicePtr,
    bytes: u64,
    pattern: u64,
}

impl Work for Fill {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Fill { to: args.ptr()?, bytes: args.u64()?, pattern: args.u64()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.write(self.to, self.bytes, 1)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.bytes / 16, processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let first = self.to.0.to_le_bytes()[0] % 8;
        let pattern = self.pattern.rotate_right(8 * u32::from(first)).to_le_bytes();
        let filled: Vec<u8> = pattern.into_iter().cycle().take(CHUNK.min(host::small(self.bytes))).collect();
        host::chunks(self.bytes, |at, len| memory.write(self.to.offset(at), &filled[..len]))
    }
}

/// The value repeated until it fills 8 bytes.
fn pattern<T: Element>(value: T) -> u64 {
    let mut bytes = [0; 8];
    for each in bytes.chunks_exact_mut(size_of::<T>()) {
        value.write(each);
    }
    u64::from_le_bytes(bytes)
}

impl Kernels {
    /// Enqueues setting every element of `to` to `value`.
    ///
    /// # Errors
    /// Another dtype than the value's, and the errors of every operation ([`Kernels`]).
    #[track_caller]
    pub fn fill<'a, T: Element>(
        &'a self,
        stream: &'a Stream,
        to: impl Into<Target<'a>>,
        value: T,
    ) -> Result<(), KernelError> {
        let check = self.check("fill", stream)?;
        let to = check.writes("to", to)?;
        check.dtype(&to, T::DTYPE)?;
        if to.operand.is_empty() {
            return Ok(());
        }
        let args = vec![to.arg(), KernelArg::U64(to.operand.bytes()), KernelArg::U64(pattern(value))];
        self.access(stream, check.kernel, &[], &[&to])?.launch(&FILL, args)
    }
}

//! `checksum`: 64 bits that identify the contents of memory, independent of its address and of the
//! order of reads.
//!
//! The memory's bytes are words of 8 bytes, counted from its first byte, little-endian, the last
//! one padded with zeros. With the output function `mix` and the constant `γ` of splitmix64 (see
//! [`crate::pattern_word`]) the checksum is
//!
//! ```text
//! mix(bytes) + Σ mix(word_i + (i + 1) · γ)      modulo 2^64
//! ```
//!
//! Addition commutes, so it is exact however the work is divided. `mix` is a bijection, so that
//! contents which differ in one word never have the same checksum; others have it once in 2^64
//! times, as far as `mix` is random. It does not protect against attacks.

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};

use crate::args::{Args, KernelParam, Ranges};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};
use crate::pattern::{GAMMA, mix};

pub(crate) const CHECKSUM: Kernel = Kernel::of::<Checksum>("checksum", Module::Bytes, Variant::Any);

/// Arguments: first byte, length in bytes, and where the checksum is added.
#[derive(Debug)]
struct Checksum {
    from: DevicePtr,
    bytes: u64,
    result: DevicePtr,
}

impl Work for Checksum {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::Ptr];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Checksum { from: args.ptr()?, bytes: args.u64()?, result: args.ptr()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.read(self.from, self.bytes, 1)?.write(self.result, 1, 8)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.bytes / 16, processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let mut sum = mix(self.bytes);
        host::chunks(self.bytes, |at, len| {
            let mut bytes = vec![0; len];
            memory.read(self.from.offset(at), &mut bytes)?;
            // All pieces but the last have whole words.
            sum = sum.wrapping_add(words(&bytes, at / 8));
            Ok(())
        })?;
        let before: Vec<u64> = host::read(memory, self.result, 0, 1)?;
        host::write(memory, self.result, 0, &[before[0].wrapping_add(sum)])
    }
}

/// The terms of the words in `bytes`, the first of which has the index `first`.
fn words(bytes: &[u8], first: u64) -> u64 {
    let mut state = first.wrapping_mul(GAMMA);
    let mut sum = 0u64;
    for piece in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..piece.len()].copy_from_slice(piece);
        state = state.wrapping_add(GAMMA);
        sum = sum.wrapping_add(mix(u64::from_le_bytes(word).wrapping_add(state)));
    }
    sum
}

/// The checksum of bytes on the host, the same as that of [`Kernels::checksum`] on a device.
pub fn checksum_of(bytes: &[u8]) -> u64 {
    mix(bytes.len() as u64).wrapping_add(words(bytes, 0))
}

impl Kernels {
    /// Enqueues computing the checksum of all bytes of `from` ([`checksum_of`] is the same on the
    /// host) into `to`, one `u64`.
    ///
    /// Memory may begin and end anywhere and have any dtype; this is fastest if it begins at a
    /// multiple of 16.
    ///
    /// # Errors
    /// A `to` that is not one element, or overlaps `from`, and the errors of every operation
    /// ([`Kernels`]).
    #[track_caller]
    pub fn checksum<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        to: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("checksum", stream)?;
        let (from, to) = (check.reads("from", from)?, check.writes("to", to)?);
        check.dtype(&to, DType::U64)?;
        check.len(&to, 1)?;
        check.apart(&to, &[&from])?;
        let args = vec![from.arg(), KernelArg::U64(from.operand.bytes()), to.arg()];
        let access = self.access(stream, check.kernel, &[&from], &[&to])?;
        access.stream().fill(to.operand.ptr(), 0, to.operand.bytes())?;
        access.launch(&CHECKSUM, args)
    }
}

//! `pattern_write` and `pattern_verify`: memory whose every word depends on its address and on a
//! seed.
//!
//! Memory is seen as words of 8 bytes at addresses that are multiples of 8, little-endian. The word
//! at address `8 k` is output `k` of the generator splitmix64 with the seed as its first state:
//!
//! ```text
//! z = seed + (k + 1) · 0x9E3779B97F4A7C15
//! z = (z ^ z >> 30) · 0xBF58476D1CE4E5B9
//! z = (z ^ z >> 27) · 0x94D049BB133111EB
//! word = z ^ z >> 31
//! ```
//!
//! (Source: Guy L. Steele, Doug Lea, Christine H. Flood, "Fast Splittable Pseudorandom Number
//! Generators", OOPSLA 2014.) Each step is a bijection. So with one seed no two words are equal,
//! and at one address no two seeds give the same word: whole words that another owner wrote, that
//! stayed from an earlier seed, or that were never written, are always found. Ranges may begin and
//! end anywhere; of a word that is partly in the range only these bytes count, so a single wrong
//! byte is missed once in 256 times.

use aquifer_device::{AccessRange, DevicePtr, KernelArg, KernelMemory, Result, Stream};

use crate::args::{Args, KernelParam, Ranges};
use crate::dtype::DType;
use crate::error::KernelError;
use crate::host;
use crate::kernel::{Kernel, Shape, Variant, Work};
use crate::kernels::Kernels;
use crate::module::Module;
use crate::operand::{Operand, Target};

pub(crate) const WRITE: Kernel = Kernel::of::<Write>("pattern_write", Module::Bytes, Variant::Any);
pub(crate) const VERIFY: Kernel = Kernel::of::<Verify>("pattern_verify", Module::Bytes, Variant::Any);

pub(crate) const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function of splitmix64.
pub(crate) fn mix(state: u64) -> u64 {
    let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// The word of the pattern at an address, which is rounded down to a multiple of 8. See
/// [`Kernels::pattern_write`].
pub fn pattern_word(address: DevicePtr, seed: u64) -> u64 {
    mix(seed.wrapping_add((address.0 / 8).wrapping_add(1).wrapping_mul(GAMMA)))
}

/// The bytes of the pattern from an address on, as many as `into` has.
pub fn pattern_bytes(address: DevicePtr, seed: u64, into: &mut [u8]) {
    let mut at = address.0;
    let mut rest = into;
    while !rest.is_empty() {
        let word = pattern_word(DevicePtr(at), seed).to_le_bytes();
        let skipped = usize::from(at.to_le_bytes()[0] % 8);
        let len = (8 - skipped).min(rest.len());
        let (piece, after) = rest.split_at_mut(len);
        piece.copy_from_slice(&word[skipped..skipped + len]);
        rest = after;
        at = at.wrapping_add(len as u64);
    }
}

/// Arguments: first byte, length in bytes, seed.
#[derive(Debug)]
struct Write {
    to: DevicePtr,
    bytes: u64,
    seed: u64,
}

impl Work for Write {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::U64];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Write { to: args.ptr()?, bytes: args.u64()?, seed: args.u64()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.write(self.to, self.bytes, 1)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.bytes / 16, processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        host::chunks(self.bytes, |at, len| {
            let (to, mut bytes) = (self.to.offset(at), vec![0; len]);
            pattern_bytes(to, self.seed, &mut bytes);
            memory.write(to, &bytes)
        })
    }
}

/// Arguments: first byte, length in bytes, seed, result. The result is two words. The number of
/// words that differ is added to the first; the second becomes the maximum of its value and of the
/// complements of the addresses of bytes that differ.
#[derive(Debug)]
struct Verify {
    from: DevicePtr,
    bytes: u64,
    seed: u64,
    result: DevicePtr,
}

impl Work for Verify {
    const PARAMS: &'static [KernelParam] = &[KernelParam::Ptr, KernelParam::U64, KernelParam::U64, KernelParam::Ptr];

    fn parse(args: &mut Args<'_>) -> Result<Self> {
        Ok(Verify { from: args.ptr()?, bytes: args.u64()?, seed: args.u64()?, result: args.ptr()? })
    }

    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>> {
        Ok(ranges.read(self.from, self.bytes, 1)?.write(self.result, 2, 8)?.done())
    }

    fn shape(&self, processors: u32) -> Shape {
        Shape::strided(self.bytes / 16, processors)
    }

    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()> {
        let mut found = Found::default();
        host::chunks(self.bytes, |at, len| {
            let from = self.from.offset(at);
            let (mut is, mut should) = (vec![0; len], vec![0; len]);
            memory.read(from, &mut is)?;
            pattern_bytes(from, self.seed, &mut should);
            if is != should {
                found.note(from, &is, &should);
            }
            Ok(())
        })?;
        let before: Vec<u64> = host::read(memory, self.result, 0, 2)?;
        let not_first = found.first.map_or(0, |first| !first);
        host::write(memory, self.result, 0, &[before[0].wrapping_add(found.words), before[1].max(not_first)])
    }
}

/// Differences.
#[derive(Debug, Default)]
struct Found {
    words: u64,
    first: Option<u64>,
    /// The last word that was counted: it may continue in the next piece.
    last: Option<u64>,
}

impl Found {
    fn note(&mut self, from: DevicePtr, is: &[u8], should: &[u8]) {
        for (offset, _) in is.iter().zip(should).enumerate().filter(|(_, (is, should))| is != should) {
            let address = from.0 + offset as u64;
            self.first.get_or_insert(address);
            if self.last.replace(address / 8) != Some(address / 8) {
                self.words += 1;
            }
        }
    }
}

/// Differences that `pattern_verify` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatches {
    /// Words that differ in at least one byte.
    pub words: u64,
    /// Address of the first byte that differs.
    pub first: DevicePtr,
}

impl Kernels {
    /// Elements of the buffer in which [`Kernels::pattern_verify`] counts.
    pub const FINDINGS_LEN: usize = 2;

    /// Enqueues writing the pattern of `seed` to all bytes of `to`: every word of 8 bytes becomes a
    /// function of its address and the seed ([`pattern_word`]), different for every address and
    /// every seed.
    ///
    /// Memory may begin and end anywhere and have any dtype. Of words that are partly in it, this
    /// part is written.
    ///
    /// # Errors
    /// The errors of every operation ([`Kernels`]).
    #[track_caller]
    pub fn pattern_write<'a>(
        &'a self,
        stream: &'a Stream,
        to: impl Into<Target<'a>>,
        seed: u64,
    ) -> Result<(), KernelError> {
        let check = self.check("pattern_write", stream)?;
        let to = check.writes("to", to)?;
        if to.operand.is_empty() {
            return Ok(());
        }
        let args = vec![to.arg(), KernelArg::U64(to.operand.bytes()), KernelArg::U64(seed)];
        self.access(stream, check.kernel, &[], &[&to])?.launch(&WRITE, args)
    }

    /// Enqueues comparing all bytes of `from` with the pattern of `seed`.
    ///
    /// Words that differ are counted in `findings`, two words that must be filled with zeros first.
    /// One buffer can collect the results of several launches. [`Kernels::mismatches`] reads it.
    ///
    /// # Errors
    /// `findings` that are not two `u64`, or overlap `from`, and the errors of every operation
    /// ([`Kernels`]).
    ///
    /// ```
    /// use aquifer::kernels::Kernels;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let kernels = memory.kernels()?;
    /// let mut x = memory.alloc::<u8>(1001, &stream)?;
    /// let mut findings = memory.alloc_zeros::<u64>(Kernels::FINDINGS_LEN, &stream)?;
    /// kernels.pattern_write(&stream, &mut x, 42)?;
    /// kernels.pattern_verify(&stream, &x, 42, &mut findings)?;
    /// assert_eq!(kernels.mismatches(&stream, &findings)?, None);
    ///
    /// x.slice_mut(700..701).fill(0, &stream)?; // a write that should not be
    /// kernels.pattern_verify(&stream, &x, 42, &mut findings)?;
    /// let found = kernels.mismatches(&stream, &findings)?.unwrap();
    /// assert_eq!((found.words, found.first), (1, x.ptr().offset(700)));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[track_caller]
    pub fn pattern_verify<'a>(
        &'a self,
        stream: &'a Stream,
        from: impl Into<Operand<'a>>,
        seed: u64,
        findings: impl Into<Target<'a>>,
    ) -> Result<(), KernelError> {
        let check = self.check("pattern_verify", stream)?;
        let (from, findings) = (check.reads("from", from)?, check.writes("findings", findings)?);
        check.dtype(&findings, DType::U64)?;
        check.len(&findings, Kernels::FINDINGS_LEN as u64)?;
        check.apart(&findings, &[&from])?;
        if from.operand.is_empty() {
            return Ok(());
        }
        let args = vec![from.arg(), KernelArg::U64(from.operand.bytes()), KernelArg::U64(seed), findings.arg()];
        self.access(stream, check.kernel, &[&from], &[&findings])?.launch(&VERIFY, args)
    }

    /// The differences found so far, if any. The host waits for the stream.
    ///
    /// # Errors
    /// As [`Kernels::pattern_verify`].
    #[track_caller]
    pub fn mismatches<'a>(
        &'a self,
        stream: &'a Stream,
        findings: impl Into<Operand<'a>>,
    ) -> Result<Option<Mismatches>, KernelError> {
        let check = self.check("pattern_verify", stream)?;
        let findings = check.reads("findings", findings)?;
        check.dtype(&findings, DType::U64)?;
        check.len(&findings, Kernels::FINDINGS_LEN as u64)?;
        let mut bytes = [0; 16];
        let access = self.access(stream, check.kernel, &[&findings], &[])?;
        access.stream().download_blocking(&mut bytes, findings.operand.ptr())?;
        let (words, not_first) = bytes.split_at(8);
        let word = |bytes| <u64 as crate::dtype::Bytes>::read(bytes);
        let found = Mismatches { words: word(words), first: DevicePtr(!word(not_first)) };
        Ok((found.words > 0).then_some(found))
    }
}

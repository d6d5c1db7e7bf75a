//! The memory of tensors: bytes on the host, pinned or not, or on a device. All views share
//! it.

use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{Device, RequestError};
use aquifer_kernels::{DType, Operand, Target};
use aquifer_transfer::internal::{bytes_of, len_of, zeroed};
use aquifer_transfer::{Owned, PinnedBuffer, PinnedPool};

use super::place::Place;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::Transfer;

/// Memory that tensors share.
#[derive(Clone)]
pub(crate) enum Memory {
    /// Read-only from now on.
    Host(Owned),
    Pinned(PinnedHost),
    Device(DeviceMemory),
}

/// Pinned host memory. Nothing writes it any more, except for the copy that fills it, which is in
/// no graph.
#[derive(Clone)]
pub(crate) struct PinnedHost {
    pub(crate) buffer: Arc<PinnedBuffer<u8>>,
    pub(crate) pool: PinnedPool,
}

/// Device memory, and the runtime of its copies.
pub(crate) struct DeviceMemory {
    pub(crate) buffer: Buffer<u8>,
    pub(crate) transfer: Transfer,
}

impl Clone for DeviceMemory {
    fn clone(&self) -> DeviceMemory {
        DeviceMemory { buffer: self.buffer.share(), transfer: self.transfer.clone() }
    }
}

impl Memory {
    /// Its place.
    pub(crate) fn place(&self) -> Place {
        match self {
            Memory::Host(_) => Place::Host,
            Memory::Pinned(memory) => Place::Pinned(memory.pool.clone()),
            Memory::Device(memory) => Place::Device(memory.transfer.clone()),
        }
    }

    /// New host memory for elements, written by `fill`: pinned memory of `pool`, or else
    /// ordinary memory, which is zeros at first.
    pub(crate) fn on_host(
        pool: Option<&PinnedPool>,
        dtype: DType,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<Memory, Error> {
        let Some(pool) = pool else { return Ok(Memory::Host(filled(dtype, len, fill)?)) };
        let mut buffer = pool.alloc::<u8>(bytes_of(len, dtype.bytes())?)?;
        fill(&mut buffer.write()?)?;
        Ok(Memory::Pinned(PinnedHost { buffer: buffer.into(), pool: pool.clone() }))
    }

    /// The pool of pinned memory.
    pub(super) fn pool(&self) -> Option<&PinnedPool> {
        match self {
            Memory::Pinned(memory) => Some(&memory.pool),
            Memory::Host(_) | Memory::Device(_) => None,
        }
    }

    /// Its size in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Memory::Host(memory) => memory.len() as u64,
            Memory::Pinned(memory) => memory.buffer.bytes() as u64,
            Memory::Device(memory) => memory.buffer.bytes(),
        }
    }

    /// Its start, to compare parts of shared memory: memory of a device may be a part of a buffer.
    pub(crate) fn start(&self) -> u64 {
        match self {
            Memory::Host(_) | Memory::Pinned(_) => 0,
            Memory::Device(memory) => memory.buffer.ptr().0,
        }
    }

    /// The bytes of host memory. Waits for the copy that fills pinned memory.
    pub(crate) fn read(&self) -> Result<&[u8], Error> {
        match self {
            Memory::Host(memory) => Ok(memory.bytes()),
            // Tensors lend slices, and nothing would tell when they end; no graph writes the
            // memory.
            Memory::Pinned(memory) => Ok(memory.buffer.read()?.leak()),
            Memory::Device(_) => Err(Error::Request(RequestError::Unsupported { what: "memory of the host" })),
        }
    }

    /// Whether both are the same memory.
    pub(crate) fn is_same(&self, other: &Memory) -> bool {
        self.identity() == other.identity()
    }

    /// An address that all owners of the memory share, and no other live memory has.
    pub(crate) fn identity(&self) -> usize {
        match self {
            Memory::Host(memory) => memory.identity(),
            Memory::Pinned(memory) => Arc::as_ptr(&memory.buffer).addr(),
            Memory::Device(memory) => Arc::as_ptr(memory.buffer.storage()).addr(),
        }
    }
}

impl DeviceMemory {
    pub(crate) fn device(&self) -> &Device {
        self.transfer.device()
    }

    /// The part with elements `start..start + len` of a dtype.
    pub(crate) fn elements(&self, dtype: DType, start: usize, len: usize) -> Result<Buffer<u8>, Error> {
        let (start, end, size) = (start as u64, (start + len) as u64, dtype.bytes());
        part_of(&self.buffer, start * size..end * size)
    }
}

/// Bytes that hold elements of `dtype`, for a kernel to read.
pub(super) fn operand_of(bytes: &Buffer<u8>, dtype: DType) -> Operand<'_> {
    Operand::new(bytes.storage(), bytes.ptr(), bytes.bytes(), dtype)
}

/// Bytes that will hold elements of `dtype`, for a kernel to write.
pub(super) fn target_of(bytes: &mut Buffer<u8>, dtype: DType) -> Target<'_> {
    Target::new(operand_of(bytes, dtype))
}

/// A part of a buffer, sharing its memory.
pub(super) fn part_of(buffer: &Buffer<u8>, bytes: Range<u64>) -> Result<Buffer<u8>, Error> {
    Ok(buffer.try_slice(len_of(bytes.start, 1)?..len_of(bytes.end, 1)?)?.share())
}

/// Evaluates an expression with the unsigned integer type of a dtype's size.
macro_rules! by_size {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype.bytes() {
            1 => {
                type $type = u8;
                $body
            }
            2 => {
                type $type = u16;
                $body
            }
            4 => {
                type $type = u32;
                $body
            }
            _ => {
                type $type = u64;
                $body
            }
        }
    };
}
pub(super) use by_size;

/// Ordinary memory for elements, written by `fill`; zeros at first.
pub(super) fn filled(
    dtype: DType,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
) -> Result<Owned, Error> {
    bytes_of(len, dtype.bytes())?;
    by_size!(dtype, T => {
        let mut elements = zeroed::<T>(len)?;
        fill(bytemuck::cast_slice_mut(&mut elements))?;
        Ok(Owned::new::<T, _>(elements))
    })
}

//! What holds the elements of tensors: bytes on the host, page-locked or not, or on a device. Shared by all views.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{Device, RequestError};
use aquifer_kernels::{DType, Element};
use bytemuck::Pod;
use half::{bf16, f16};

use super::place::Place;
use crate::copy::Owned;
use crate::error::TransferError;
use crate::host_vec;
use crate::pinned::{PinnedBuffer, PinnedPool};
use crate::runtime::Transfer;

/// Memory that tensors share.
#[derive(Clone, Debug)]
pub(crate) enum Memory {
    Host(HostMemory),
    Pinned(PinnedHost),
    Device(DeviceMemory),
}

/// Host memory that nobody writes any more.
#[derive(Clone)]
pub(crate) struct HostMemory(Owned);

/// Page-locked host memory. Nobody writes it any more, except for the copy that fills it.
#[derive(Clone, Debug)]
pub(crate) struct PinnedHost {
    pub(crate) buffer: Arc<PinnedBuffer<u8>>,
    pub(crate) pool: PinnedPool,
}

/// Device memory, and what copies to and from it.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) buffer: Buffer<u8>,
    pub(crate) transfer: Transfer,
}

impl Clone for DeviceMemory {
    fn clone(&self) -> DeviceMemory {
        DeviceMemory { buffer: self.buffer.share(), transfer: self.transfer.clone() }
    }
}

impl HostMemory {
    /// The memory of whatever lends elements.
    pub(crate) fn of<T: Pod, S: AsRef<[T]> + Send + Sync + 'static>(owner: S) -> HostMemory {
        HostMemory(Owned::new::<T, S>(owner))
    }

    /// `len` elements of a dtype with all bits 0, written by `fill`; `None` if there is no memory for them.
    pub(crate) fn filled<E>(
        dtype: DType,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Option<HostMemory>, E> {
        macro_rules! by_size {
            ($type:ty) => {{
                let Ok(mut elements) = bytemuck::allocation::try_zeroed_vec::<$type>(len) else { return Ok(None) };
                fill(bytemuck::cast_slice_mut(&mut elements))?;
                Ok(Some(HostMemory::of::<$type, _>(elements)))
            }};
        }
        match dtype.bytes() {
            1 => by_size!(u8),
            2 => by_size!(u16),
            4 => by_size!(u32),
            _ => by_size!(u64),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A part of it, kept alive by the part.
    pub(crate) fn part(&self, range: Range<usize>) -> HostPart {
        debug_assert!(range.end <= self.len());
        HostPart { memory: self.clone(), range }
    }
}

/// A part of shared host memory.
pub(crate) struct HostPart {
    memory: HostMemory,
    range: Range<usize>,
}

impl HostPart {
    pub(crate) fn bytes(&self) -> Result<&[u8], TransferError> {
        let (start, end, len) = (self.range.start as u64, self.range.end as u64, self.memory.len() as u64);
        self.memory.bytes().get(self.range.clone()).ok_or(TransferError::Request(RequestError::OutOfBounds {
            start,
            end,
            len,
        }))
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }
}

impl Memory {
    /// Where it is.
    pub(crate) fn place(&self) -> Place {
        match self {
            Memory::Host(_) => Place::Host,
            Memory::Pinned(memory) => Place::Pinned(memory.pool.clone()),
            Memory::Device(memory) => Place::Device(memory.transfer.clone()),
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

    /// Where it begins, compared with others that share it: memory of a device may be a part of a buffer.
    pub(crate) fn start(&self) -> u64 {
        match self {
            Memory::Host(_) | Memory::Pinned(_) => 0,
            Memory::Device(memory) => memory.buffer.ptr().0,
        }
    }

    /// The bytes of host memory. Waits for the copy that fills page-locked memory.
    pub(crate) fn read(&self) -> Result<&[u8], TransferError> {
        match self {
            Memory::Host(memory) => Ok(memory.bytes()),
            Memory::Pinned(memory) => memory.buffer.read(),
            Memory::Device(_) => Err(TransferError::Request(RequestError::Unsupported { what: "memory of the host" })),
        }
    }

    /// Whether both are the same memory.
    pub(crate) fn is_same(&self, other: &Memory) -> bool {
        self.identity() == other.identity()
    }

    /// Where on the host that lies which all its owners share, so that no other memory has it at the same time.
    pub(crate) fn identity(&self) -> usize {
        match self {
            Memory::Host(memory) => memory.0.identity(),
            Memory::Pinned(memory) => Arc::as_ptr(&memory.buffer).addr(),
            Memory::Device(memory) => Arc::as_ptr(memory.buffer.storage()).addr(),
        }
    }
}

impl DeviceMemory {
    pub(crate) fn device(&self) -> &Device {
        self.transfer.device()
    }

    /// The part that elements `start..start + len` of a dtype lie in.
    pub(crate) fn elements(&self, dtype: DType, start: usize, len: usize) -> Result<Buffer<u8>, TransferError> {
        let (start, end, size) = (start as u64, (start + len) as u64, dtype.bytes());
        part_of(&self.buffer, start * size..end * size)
    }
}

/// Some bytes of a buffer, sharing its memory.
pub(super) fn part_of(buffer: &Buffer<u8>, bytes: Range<u64>) -> Result<Buffer<u8>, TransferError> {
    Ok(buffer.try_slice(host_vec::len_of(bytes.start, 1)?..host_vec::len_of(bytes.end, 1)?)?.share())
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("bytes", &self.len()).finish()
    }
}

/// Calls a generic function with the Rust type of a dtype.
macro_rules! by_dtype {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            DType::U8 => {
                type $type = u8;
                $body
            }
            DType::I32 => {
                type $type = i32;
                $body
            }
            DType::U32 => {
                type $type = u32;
                $body
            }
            DType::I64 => {
                type $type = i64;
                $body
            }
            DType::U64 => {
                type $type = u64;
                $body
            }
            DType::F16 => {
                type $type = half::f16;
                $body
            }
            DType::BF16 => {
                type $type = half::bf16;
                $body
            }
            DType::F32 => {
                type $type = f32;
                $body
            }
            DType::F64 => {
                type $type = f64;
                $body
            }
            other => return Err(crate::error::TransferError::NoDType { name: other.name().to_owned() }),
        }
    };
}
pub(crate) use by_dtype;

/// Elements that tensors hold: the dtypes of the kernels, which plain bytes can be.
pub trait Scalar: Element + Pod {}

macro_rules! scalars {
    ($($type:ty)*) => { $(impl Scalar for $type {})* };
}

scalars!(u8 i32 u32 i64 u64 f16 bf16 f32 f64);

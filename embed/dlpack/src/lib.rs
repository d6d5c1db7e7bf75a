//! Buffers and tensors of Aquifer to and from other libraries by [DLPack], without a copy.
//!
//! ```
//! use aquifer::Tensor;
//! use aquifer::prelude::*;
//! # let device = aquifer::open("sim:1GiB")?;
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let tensor = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let dlpack = aquifer_dlpack::export_tensor(&tensor, &stream)?; // a `DLManagedTensorVersioned` for any consumer
//! // SAFETY: it describes what it says, as it comes from the line above.
//! let again = unsafe { aquifer_dlpack::import_tensor(dlpack, &memory, &stream) }?;
//! assert_eq!(again.as_slice::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), aquifer_dlpack::Error>(())
//! ```
//!
//! # Streams
//!
//! A DLPack tensor does not tell which stream its data is ready on; both sides agree on one. Each
//! function here takes that stream.
//!
//! * **Export**: work that the consumer enqueues on `stream`, or orders after it, comes after all
//!   work on the memory so far. Later verbs on other handles come after what is enqueued on
//!   `stream` by then. In Python's protocol it is the stream that the consumer passes to
//!   `__dlpack__`.
//! * **Import**: the data is ready on `stream`, which is the one that was passed to the producer.
//!   Dropping the last handle of device memory waits on the host for work that uses it, because the
//!   producer may reuse the memory at once.
//!
//! # Limits
//!
//! Elements lie in row-major order without gaps: make other tensors contiguous first. Device memory
//! is that of CUDA devices; memory of a simulated device means nothing to others, and is refused.
//! Elements are those of [`DType`].
//!
//! [DLPack]: https://dmlc.github.io/dlpack/latest/

mod error;
mod export;
mod import;

pub use error::Error;
pub use export::{export_buffer, export_tensor};
pub use import::{import_buffer, import_tensor};

/// A managed tensor of the versioned ABI, which its consumer owns.
pub use dlpark::versioned::Dlpack;

use aquifer::kernels::DType;
use dlpark::ffi::DLDataType;

/// DLPack's name of a dtype.
fn data_type(dtype: DType) -> Option<DLDataType> {
    Some(match dtype {
        DType::U8 => DLDataType::U8,
        DType::I32 => DLDataType::I32,
        DType::U32 => DLDataType::U32,
        DType::I64 => DLDataType::I64,
        DType::U64 => DLDataType::U64,
        DType::F16 => DLDataType::F16,
        DType::BF16 => DLDataType::BF16,
        DType::F32 => DLDataType::F32,
        DType::F64 => DLDataType::F64,
        _ => return None,
    })
}

/// Calls a function with the Rust type of a dtype: `typed!(dtype, f::<T>(arguments))`.
macro_rules! typed {
    ($dtype:expr, $function:ident::<T>($($argument:expr),*)) => {
        match $dtype {
            DType::U8 => $function::<u8>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::U32 => $function::<u32>($($argument),*),
            DType::I64 => $function::<i64>($($argument),*),
            DType::U64 => $function::<u64>($($argument),*),
            DType::F16 => $function::<half::f16>($($argument),*),
            DType::BF16 => $function::<half::bf16>($($argument),*),
            DType::F32 => $function::<f32>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            other => Err(Error::DType { dtype: other.name().to_owned() }),
        }
    };
}
use typed;

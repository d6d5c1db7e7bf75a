//! Options of moving a tensor.

use aquifer_device::Stream;
use aquifer_kernels::DType;

/// Options of moving a tensor, or a set of them: the new dtype, the stream of the copy, and the
/// fallback when memory runs out.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::tensor::To;
/// let to = To::new().dtype(DType::BF16).or_host();
/// # let _ = to;
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing moves before it is given to `Tensor::to_with`"]
pub struct To {
    pub(crate) dtype: Option<DType>,
    pub(crate) stream: Option<Stream>,
    pub(crate) or_host: bool,
}

impl To {
    /// The same dtype, on streams of the runtime, and an error where memory runs out.
    pub fn new() -> To {
        To::default()
    }

    /// Another dtype, by the rules of [`aquifer_kernels::Kernels::cast`].
    pub fn dtype(self, dtype: DType) -> To {
        To { dtype: Some(dtype), ..self }
    }

    /// The stream that the copy runs on, in order with the rest of its work, and that device memory
    /// is allocated for. Memory of a tensor that is in its place already is made ready for it. For
    /// a thread's default stream, that thread must take the result: it may enqueue a conversion on
    /// the device.
    pub fn stream(self, stream: &Stream) -> To {
        To { stream: Some(stream.clone()), ..self }
    }

    /// Leaves the result on the host if the device has no memory for it, as
    /// [`crate::Tensor::place`] reports. A lack of pinned memory is an error in any case.
    pub fn or_host(self) -> To {
        To { or_host: true, ..self }
    }
}

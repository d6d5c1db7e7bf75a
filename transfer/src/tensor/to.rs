//! Options of moving a tensor.

use aquifer_device::Stream;
use aquifer_kernels::DType;

use super::place::Place;
use crate::error::TransferError;
use crate::placement::Fallback;

/// Options of moving a tensor: the new dtype, the stream of the copy, and the fallback when memory
/// runs out.
///
/// ```
/// use aquifer_kernels::DType;
/// use aquifer_transfer::{Fallback, To};
/// let to = To::new().dtype(DType::BF16).fallback(Fallback::Host);
/// # let _ = to;
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing moves before it is given to `Tensor::to_with`"]
pub struct To {
    pub(super) dtype: Option<DType>,
    pub(super) stream: Option<Stream>,
    native: bool,
    pub(super) fallback: Fallback,
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

    /// Refuses a device that does not compute with the dtype by instructions of its own, and says
    /// what it lacks.
    pub fn native(self) -> To {
        To { native: true, ..self }
    }

    /// The fallback if the device has no memory for it. With [`Fallback::Host`] the result is on
    /// the host, as [`crate::Tensor::place`] reports. A lack of page-locked memory is an error in
    /// any case.
    pub fn fallback(self, fallback: Fallback) -> To {
        To { fallback, ..self }
    }

    /// Checks that the device has instructions for the dtype, if it must.
    pub(super) fn check_native(&self, place: &Place, dtype: DType) -> Result<(), TransferError> {
        let Some(device) = place.device().filter(|_| self.native) else { return Ok(()) };
        let info = device.info();
        lacking(dtype, info.compute_capability)
            .map_or(Ok(()), |missing| Err(TransferError::NotNative { dtype, device: info.into(), missing }))
    }
}

/// The instructions that devices of a compute capability lack for a dtype.
fn lacking(dtype: DType, capability: (u32, u32)) -> Option<&'static str> {
    dtype.missing_on(capability).filter(|_| !dtype.is_native_on(capability))
}

#[cfg(test)]
mod tests {
    use aquifer_device::{DeviceInfo, DriverKind};

    use super::*;

    #[test]
    fn lacking_instructions_are_reported() {
        assert_eq!(lacking(DType::BF16, (8, 0)), None);
        assert!(lacking(DType::BF16, (7, 5)).is_some_and(|missing| missing.contains("bf16")));
        assert!(lacking(DType::F16, (5, 2)).is_some_and(|missing| missing.contains("f16")));
        let device = (&DeviceInfo::new(DriverKind::Cuda, 1, "T4", 16 << 30)).into();
        let error = TransferError::NotNative { dtype: DType::BF16, device, missing: "x" };
        assert_eq!(error.to_string(), "cuda:1 (T4) does not compute with bf16 natively: it lacks x");
    }
}

//! The functions that ONNX Runtime takes have no device and no stream: one of each is bound for the process.

use std::ffi::{c_int, c_void};
use std::sync::{PoisonError, RwLock};

use crate::failure::Failure;
use crate::gpu::Gpu;

static BOUND: RwLock<Option<(c_int, usize)>> = RwLock::new(None);

pub(crate) fn bind(device: c_int, stream: *mut c_void) -> Result<(), Failure> {
    // The stream is adopted now, so that errors show here.
    Gpu::of(device)?.with_stream(stream, |_| ())?;
    *BOUND.write().unwrap_or_else(PoisonError::into_inner) = Some((device, stream.expose_provenance()));
    Ok(())
}

/// The device and the stream that were bound.
pub(crate) fn bound() -> Result<(&'static Gpu, *mut c_void), Failure> {
    let bound = *BOUND.read().unwrap_or_else(PoisonError::into_inner);
    let (device, stream) =
        bound.ok_or_else(|| Failure::invalid("call aquifer_ort_bind with the session's device and stream first"))?;
    Ok((Gpu::of(device)?, std::ptr::with_exposed_provenance_mut(stream)))
}

//! The context in which calls are made: its owner, and how it is made current on the calling thread
//! for the length of a call.
//!
//! Every call first makes the context current on its thread, because the driver looks for it there,
//! and then restores the previous one: other libraries in the process (the CUDA runtime, cudarc,
//! another device of this crate) rely on it. Where the context is current already, this is one
//! cheap call; it is checked each time, because any code may change the current context.
//!
//! cudarc makes its context current when one of its objects is dropped, and leaves it so, even a
//! context that ends then. Where this crate may drop the last reference to such an object, the
//! context is current already, as in any other call.
//!
//! Calls that CUDA calls *potentially unsafe* during a capture are made in the relaxed capture
//! mode, so that they neither fail nor break a capture that began in another mode, on this or
//! another thread. These are allocation, freeing, mapping, queries, modules, making and giving up
//! contexts, and calls that may lead to them: launches and fills, which may load a kernel, and
//! copies, which may go through memory of the driver's. Recording an event, waiting for one, and
//! captures themselves keep the thread's mode.
//!
//! Invariant C1: the context lives as long as [`GpuContext`]: it is retained by it, or held by
//! cudarc's object.

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, OnceLock};

use aquifer_device::{DeviceError, Operation, Result, fork};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice, CUstreamCaptureMode};

use crate::context_state::ContextState;
use crate::functions::Functions;
use crate::installation::{Installation, check, check_function};
use crate::raw::handle;

/// The context of a GPU, and the driver's functions to call in it.
#[derive(Debug)]
pub(crate) struct GpuContext {
    pub(crate) installation: Installation,
    pub(crate) device: CUdevice,
    raw: RawContext,
    /// cudarc's object of the context, once it was asked for or given.
    pub(crate) cudarc: OnceLock<Arc<CudaContext>>,
    /// Whether the primary context was retained here. Otherwise cudarc's object keeps the context
    /// alive.
    retained: bool,
    pub(crate) shared: Arc<ContextState>,
}

/// Destroys an object by its handle, while the context is current.
type Destroy = unsafe fn(&GpuContext, u64) -> Result<()>;

/// How often a call that gives something back is made where there is no later attempt.
const ATTEMPTS_AT_LAST: u32 = 3;

/// Makes a call for the last time, several times if it fails and the device is not lost.
pub(crate) fn persistently(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    (1..ATTEMPTS_AT_LAST)
        .fold(call(), |outcome, _| outcome.or_else(|error| if error.is_device_lost() { Err(error) } else { call() }))
}

/// A context's handle. It is used from every thread, as the driver allows.
#[derive(Clone, Copy, Debug)]
struct RawContext(CUcontext);

// SAFETY: a handle is a number to all code but the driver, which takes it on every thread.
unsafe impl Send for RawContext {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawContext {}

impl GpuContext {
    /// The primary context of a device.
    pub(crate) fn primary(installation: Installation, ordinal: u32) -> Result<Arc<GpuContext>> {
        let device = installation.device(Operation::Init, ordinal)?;
        // As far as the driver allows it where no context is current.
        let _mode = RelaxedMode::enter(installation.functions, Operation::Init).ok();
        let mut context = ptr::null_mut();
        // SAFETY: the handle outlives the call (F1).
        let code = unsafe { (installation.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        check(Operation::Init, code).map_err(|error| {
            error
                .of_function("cuDevicePrimaryCtxRetain")
                .with_more(format!("the context of GPU {ordinal} could not be made"))
        })?;
        Ok(GpuContext::new(installation, device, context, None))
    }

    /// The caller's context.
    pub(crate) fn shared(installation: Installation, context: Arc<CudaContext>) -> Arc<GpuContext> {
        let (device, handle) = (context.cu_device(), context.cu_ctx());
        GpuContext::new(installation, device, handle, Some(context))
    }

    fn new(
        installation: Installation,
        device: CUdevice,
        context: CUcontext,
        given: Option<Arc<CudaContext>>,
    ) -> Arc<GpuContext> {
        let (shared, retained) = (ContextState::find(handle(context)), given.is_none());
        let cudarc = given.map(OnceLock::from).unwrap_or_default();
        Arc::new(GpuContext { installation, device, raw: RawContext(context), cudarc, retained, shared })
    }

    /// Whether a context of cudarc's is this one.
    pub(crate) fn is(&self, context: &CudaContext) -> bool {
        context.cu_ctx() == self.raw.0
    }

    /// The context's handle, for calls that name it. It lives as long as this.
    pub(crate) fn handle(&self) -> CUcontext {
        self.raw.0
    }

    /// The driver's functions.
    pub(crate) fn functions(&self) -> &'static Functions {
        self.installation.functions
    }

    /// Destroys an object that nothing uses any more. One that the driver refuses to destroy is
    /// leaked until the end of the context.
    ///
    /// # Safety
    /// `raw` must be a live object that nothing uses any more and nothing else destroys, and
    /// `destroy` destroys objects of its kind.
    pub(crate) unsafe fn destroy_or_leak(&self, name: &'static str, raw: u64, destroy: Destroy) {
        if fork::is_child() {
            return;
        }
        let destroyed = persistently(|| {
            let _current = self.enter_relaxed(Operation::Init)?;
            // SAFETY: the caller vouches for the object, and the context is current. A call that
            // failed did not destroy it.
            unsafe { destroy(self, raw) }
        });
        match destroyed {
            // Everything goes with the context of a lost device.
            Err(error) if !error.is_device_lost() => tracing::warn!(%error, "{name} {raw:#x} is leaked"),
            _ => {}
        }
    }

    /// Makes the context current until the result is dropped.
    pub(crate) fn enter(&self, operation: Operation) -> Result<Current<'_>> {
        let pushed = !self.is_current(operation)?;
        if pushed {
            // SAFETY: the context is alive (C1, F1).
            let code = unsafe { (self.functions().cuCtxPushCurrent_v2)(self.raw.0) };
            check(operation, code).map_err(|error| {
                let error = error.of_function("cuCtxPushCurrent");
                error.with_more(format_args!("{operation} was not called, as the context could not be made current"))
            })?;
        }
        Ok(Current { context: self, pushed, mode: None, of_this_thread: PhantomData })
    }

    fn is_current(&self, operation: Operation) -> Result<bool> {
        let mut current = ptr::null_mut();
        // SAFETY: the handle outlives the call (F1).
        let code = unsafe { (self.functions().cuCtxGetCurrent)(&raw mut current) };
        check(operation, code).map_err(|error| {
            let error = error.of_function("cuCtxGetCurrent");
            error.with_more(format_args!("{operation} was not called, as the thread's context is not known"))
        })?;
        Ok(current == self.raw.0)
    }

    /// Makes the context current and lets the thread's calls pass during captures, until the result
    /// is dropped.
    pub(crate) fn enter_relaxed(&self, operation: Operation) -> Result<Current<'_>> {
        let mut current = self.enter(operation)?;
        current.mode = Some(RelaxedMode::enter(self.functions(), operation)?);
        Ok(current)
    }

    /// Makes a call of the driver in the context, as [`GpuContext::enter_relaxed`] does.
    pub(crate) fn call(&self, operation: Operation, call: impl FnOnce(&'static Functions) -> u32) -> Result<()> {
        let _current = self.enter_relaxed(operation)?;
        check(operation, call(self.functions()))
    }

    /// Least and greatest stream priority.
    pub(crate) fn priorities(&self) -> Result<(i32, i32)> {
        let _current = self.enter_relaxed(Operation::Init)?;
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        // SAFETY: the numbers outlive the call (F1).
        let code = unsafe { (self.functions().cuCtxGetStreamPriorityRange)(&raw mut least, &raw mut greatest) };
        check(Operation::Init, code).map_err(|error| error.of_function("cuCtxGetStreamPriorityRange"))?;
        Ok((least, greatest))
    }
}

impl Drop for GpuContext {
    fn drop(&mut self) {
        if fork::is_child() {
            return std::mem::forget(self.cudarc.take());
        }
        let _mode = RelaxedMode::enter(self.functions(), Operation::Init).ok();
        if let Some(context) = self.cudarc.take() {
            let mut current = self.enter(Operation::Init).ok();
            drop(context);
            // A context that cudarc destroys is taken off the thread, too.
            if let Some(current) = &mut current {
                current.pushed &= self.is_current(Operation::Init).unwrap_or(false);
            }
        }
        if self.retained {
            let released = persistently(|| {
                // SAFETY: retained once in `primary`, and nothing uses it any more (C1, F1). A call
                // that failed did not release it.
                let code = unsafe { (self.functions().cuDevicePrimaryCtxRelease_v2)(self.device) };
                check_function(Operation::Init, "cuDevicePrimaryCtxRelease", code)
            });
            if let Err(error) = released {
                tracing::debug!(%error, "a primary context could not be released");
            }
        }
    }
}

/// While it lives, the context is current on the thread that made it.
#[derive(Debug)]
pub(crate) struct Current<'a> {
    context: &'a GpuContext,
    pushed: bool,
    /// Set if the thread is in the relaxed capture mode, too. It leaves the mode first.
    mode: Option<RelaxedMode>,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.mode = None;
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: the handle outlives the call, and the context on top is the one that was
            // pushed (F1).
            let code = unsafe { (self.context.functions().cuCtxPopCurrent_v2)(&raw mut popped) };
            if let Err(error) = check(Operation::Init, code) {
                tracing::warn!(%error, "the thread's earlier context could not be restored");
            }
        }
    }
}

/// While it lives, the thread that made it is in the relaxed capture mode.
pub(crate) struct RelaxedMode {
    functions: &'static Functions,
    before: c_uint,
    of_this_thread: PhantomData<*const ()>,
}

impl RelaxedMode {
    pub(crate) fn enter(functions: &'static Functions, operation: Operation) -> Result<RelaxedMode> {
        let mode = exchange_mode(functions, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint);
        let before = mode.map_err(|code| {
            let error = DeviceError::new(operation, aquifer_device::Code(code))
                .of_function("cuThreadExchangeStreamCaptureMode");
            error.with_detail(format!("{operation} was not called, as the thread's capture mode could not be set"))
        })?;
        Ok(RelaxedMode { functions, before, of_this_thread: PhantomData })
    }
}

impl fmt::Debug for RelaxedMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelaxedMode").field("before", &self.before).finish_non_exhaustive()
    }
}

impl Drop for RelaxedMode {
    fn drop(&mut self) {
        if let Err(code) = exchange_mode(self.functions, self.before) {
            tracing::warn!(code, "the thread's capture mode could not be restored");
        }
    }
}

/// Sets the thread's capture mode and returns the earlier one.
fn exchange_mode(functions: &Functions, mut mode: c_uint) -> Result<c_uint, u32> {
    // SAFETY: the number outlives the call (F1).
    match unsafe { (functions.cuThreadExchangeStreamCaptureMode)(&raw mut mode) } {
        0 => Ok(mode),
        code => Err(code),
    }
}

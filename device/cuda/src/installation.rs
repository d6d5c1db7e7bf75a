//! The installed driver: loads it, checks it, starts it, and asks which GPUs it sees.

use std::env;
use std::ffi::{CStr, c_int, c_uint};
use std::sync::OnceLock;

use aquifer_device::{Code, DeviceError, DeviceInfo, Operation, PhysicalOptions, Result, fork};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attr};

use crate::functions::Functions;
use crate::library;
use crate::shapes::AllocationProperties;
use crate::unavailable::Unavailable;

/// The oldest CUDA version that will do: that of the oldest bindings of cudarc.
const NEEDED: (u32, u32) = (11, 4);

/// A driver that was started. Its functions stay for the life of the process.
#[derive(Clone, Copy)]
pub(crate) struct Installation {
    pub(crate) functions: &'static Functions,
    /// The newest CUDA version that it supports.
    pub(crate) version: (u32, u32),
}

impl std::fmt::Debug for Installation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Installation").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Found once; a failure is not kept, because the driver may be installed or loaded later.
static FUNCTIONS: OnceLock<&'static Functions> = OnceLock::new();

impl Installation {
    /// Loads the driver, checks it and starts it.
    pub(crate) fn find() -> Result<Installation, Unavailable> {
        if fork::is_child() {
            return Err(Unavailable::Forked);
        }
        let functions = match FUNCTIONS.get() {
            Some(functions) => functions,
            None => {
                let functions = load(&[])?;
                FUNCTIONS.get_or_init(|| functions)
            }
        };
        start(functions)
    }

    /// As [`Installation::find`], with some functions taken as missing.
    pub(crate) fn find_without(missing: &[&str]) -> Result<Installation, Unavailable> {
        start(load(missing)?)
    }

    /// How many GPUs the driver sees.
    pub(crate) fn count(&self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: the number outlives the call (F1).
        check_function(Operation::Init, "cuDeviceGetCount", unsafe {
            (self.functions.cuDeviceGetCount)(&raw mut count)
        })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The driver's number of the GPU with the given ordinal.
    pub(crate) fn device(&self, operation: Operation, ordinal: u32) -> Result<CUdevice> {
        let mut device = 0;
        let found = match c_int::try_from(ordinal) {
            // SAFETY: the number outlives the call (F1).
            Ok(ordinal) => check_function(operation, "cuDeviceGet", unsafe {
                (self.functions.cuDeviceGet)(&raw mut device, ordinal)
            }),
            Err(_) => Err(DeviceError::refused(operation, Code::INVALID_DEVICE)),
        };
        match found {
            Ok(()) => Ok(device),
            Err(error) if error.code == Code::INVALID_DEVICE => {
                let detail = format!("there is no GPU {ordinal}; the driver shows {}, from 0", self.count()?);
                Err(error.with_detail(detail))
            }
            Err(error) => Err(error),
        }
    }

    /// An attribute of a GPU; 0 for one that the driver does not know.
    pub(crate) fn attribute(&self, device: CUdevice, attribute: Attr) -> Result<u64> {
        let mut value: c_int = 0;
        // SAFETY: the number outlives the call (F1).
        let code = unsafe { (self.functions.cuDeviceGetAttribute)(&raw mut value, attribute as c_uint, device) };
        if Code(code) == Code::INVALID_VALUE {
            return Ok(0);
        }
        check(Operation::Attribute, code)?;
        Ok(u64::try_from(value).unwrap_or(0))
    }

    /// Facts about a GPU that can be had without opening it: all but its stream priorities.
    pub(crate) fn info(&self, ordinal: u32) -> Result<DeviceInfo> {
        let device = self.device(Operation::Init, ordinal)?;
        let mut info = DeviceInfo::new(crate::KIND, ordinal, self.name(device)?, self.total_bytes(device)?);
        let number = |attribute| self.attribute(device, attribute).map(|value| u32::try_from(value).unwrap_or(0));
        info.compute_capability = (
            number(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        info.shares_host_memory = self.attribute(device, Attr::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0;
        info.driver_version = Some(self.version);
        info.granularity_bytes = self.granularity(device)?;
        Ok(info)
    }

    fn name(&self, device: CUdevice) -> Result<String> {
        const BYTES: u8 = 255;
        // One byte more, which stays 0.
        let mut name = [0_u8; BYTES as usize + 1];
        // SAFETY: the buffer outlives the call and has the given length (F1).
        let code = unsafe { (self.functions.cuDeviceGetName)(name.as_mut_ptr().cast(), BYTES.into(), device) };
        check_function(Operation::Init, "cuDeviceGetName", code)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    fn total_bytes(&self, device: CUdevice) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the number outlives the call (F1).
        let code = unsafe { (self.functions.cuDeviceTotalMem_v2)(&raw mut bytes, device) };
        check_function(Operation::Init, "cuDeviceTotalMem", code)?;
        Ok(bytes as u64)
    }

    /// The least granularity of physical memory and mappings; `None` where the GPU or the driver
    /// cannot map.
    fn granularity(&self, device: CUdevice) -> Result<Option<u64>> {
        let (Some(granularity), true) = (self.functions.cuMemGetAllocationGranularity, self.functions.can_map()) else {
            return Ok(None);
        };
        if self.attribute(device, Attr::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? == 0 {
            return Ok(None);
        }
        let properties = AllocationProperties::new(device, PhysicalOptions::default());
        let mut bytes = 0;
        // SAFETY: the number and the properties outlive the call (F1); 0 asks for the minimum.
        let code = unsafe { granularity(&raw mut bytes, &raw const properties, 0) };
        check_function(Operation::CreatePhysical, "cuMemGetAllocationGranularity", code)?;
        Ok((bytes > 0).then_some(bytes as u64))
    }
}

/// The result of a call as an error of `operation`.
pub(crate) fn check(operation: Operation, code: u32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(error_of(operation, Code(code))) }
}

/// A bad argument.
#[cold]
pub(crate) fn bad_value(operation: Operation, detail: impl Into<String>) -> DeviceError {
    DeviceError::refused(operation, Code::INVALID_VALUE).with_detail(detail)
}

/// As [`check`], for a function that is not the operation's own.
pub(crate) fn check_function(operation: Operation, function: &'static str, code: u32) -> Result<()> {
    check(operation, code).map_err(|error| error.of_function(function))
}

#[cold]
fn error_of(operation: Operation, code: Code) -> DeviceError {
    let error = DeviceError::new(operation, code);
    match explanation(code) {
        Some(explanation) => error.with_detail(explanation),
        None => error,
    }
}

/// Explains codes that other code in the process caused, which their names do not say.
fn explanation(code: Code) -> Option<&'static str> {
    match code {
        Code(3) => Some(
            "the driver was not initialised in this process: a forked child cannot use the driver that its parent \
             initialised, so start another process instead",
        ),
        Code(4) => Some("the driver is shutting down, because the process ends"),
        Code(46) => Some("another process has the GPU to itself (see `nvidia-smi -q -d COMPUTE`), or it must be reset"),
        Code(709) => Some(
            "other code destroyed or reset the device's context, and with it all memory, streams and events made there",
        ),
        _ => None,
    }
}

/// Value of `CUDA_VISIBLE_DEVICES`, the GPUs that the driver shows to this program.
pub fn visible_devices() -> Option<String> {
    env::var_os("CUDA_VISIBLE_DEVICES").map(|value| value.to_string_lossy().into_owned())
}

fn load(missing: &[&str]) -> Result<&'static Functions, Unavailable> {
    let library = library::open()?;
    let found = Functions::find(&library, missing);
    // The functions below must stay (F1), and where some are missing the version can still be
    // asked.
    let library = Box::leak(Box::new(library));
    match found {
        Ok(functions) => Ok(Box::leak(Box::new(functions))),
        // It is from before that function, or it is broken.
        Err(symbol) => {
            let version = library_version(library, missing);
            Err(version.and_then(too_old).unwrap_or(Unavailable::MissingSymbol { symbol, version }))
        }
    }
}

/// The error of a driver that is too old, if it is. A toolkit's stub has no version.
fn too_old(supported: (u32, u32)) -> Option<Unavailable> {
    (supported > (0, 0) && supported < NEEDED).then_some(Unavailable::TooOld { supported, needed: NEEDED })
}

/// The version of a driver that may lack anything.
fn library_version(library: &libloading::Library, missing: &[&str]) -> Option<(u32, u32)> {
    type Version = unsafe extern "C" fn(*mut c_int) -> u32;
    if missing.contains(&"cuDriverGetVersion") {
        return None;
    }
    // SAFETY: the name belongs to this signature (F1).
    let found = unsafe { library.get::<Version>("cuDriverGetVersion") };
    version(*found.ok()?).ok()
}

/// The newest CUDA version that a driver supports. Legal before the driver is started.
fn version(ask: unsafe extern "C" fn(*mut c_int) -> u32) -> Result<(u32, u32)> {
    let mut number: c_int = 0;
    // SAFETY: the number outlives the call (F1).
    check_function(Operation::Init, "cuDriverGetVersion", unsafe { ask(&raw mut number) })?;
    let number = u32::try_from(number).unwrap_or(0);
    Ok((number / 1000, number % 1000 / 10))
}

fn start(functions: &'static Functions) -> Result<Installation, Unavailable> {
    let failed = |error: DeviceError| Unavailable::Failed { code: error.code };
    let unasked = version(functions.cuDriverGetVersion);
    if let Some(too_old) = unasked.as_ref().ok().copied().and_then(too_old) {
        return Err(too_old);
    }
    // SAFETY: the only flags that are legal (F1).
    let started = check(Operation::Init, unsafe { (functions.cuInit)(0) });
    match started.map_err(failed) {
        Ok(()) => {}
        Err(Unavailable::Failed { code: Code(34) }) => return Err(Unavailable::Stub),
        Err(Unavailable::Failed { code: Code::NO_DEVICE }) => return Err(none_visible()),
        Err(other) => return Err(other),
    }
    let installation = Installation { functions, version: unasked.map_err(failed)? };
    if installation.count().map_err(failed)? == 0 { Err(none_visible()) } else { Ok(installation) }
}

fn none_visible() -> Unavailable {
    match visible_devices() {
        // The first GPU is there if any GPU is.
        Some(value) if value.trim() != "0" => Unavailable::Hidden { value },
        _ => Unavailable::NoDevice,
    }
}

//! Finding and opening devices: by name, by ordinal, or the best one available. This is where the
//! drivers that a build has come together.
//!
//! Nothing falls back silently: [`open_best`] reports its choice and the reason, and the error of a
//! device that is not available lists those that are.

use std::str::FromStr;

use aquifer_device::{Device, DeviceError, DeviceInfo, Operation, fork};
#[cfg(feature = "sim")]
use aquifer_sim::{SimConfig, SimConfigError, SimDriver};

use crate::error::Error;

/// The name of a device to open, as on a command line. [`open`] parses one and opens it.
///
/// | text | device |
/// | --- | --- |
/// | `cuda`, `cuda:1` | a real GPU, by ordinal |
/// | `sim`, `sim:80GiB`, `sim:81408MiB`, `sim:h100`, `sim:24GiB,seed=7` | a simulated GPU; see [`SimConfig::parse`](crate::device::sim::SimConfig::parse) |
/// | `cpu` | the host, which has no device memory to manage: the name parses, and opening it is an error that says so |
///
/// ```
/// use aquifer::device::DeviceSpec;
/// let spec: DeviceSpec = "sim:24GiB".parse()?;
/// let device = spec.open()?;
/// assert_eq!(device.info().total_bytes, 24 << 30);
/// assert!("gpu".parse::<DeviceSpec>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DeviceSpec {
    /// A real GPU, by ordinal.
    Cuda(u32),
    /// A simulated GPU.
    #[cfg(feature = "sim")]
    Sim(Box<SimConfig>),
    /// The host.
    Cpu,
}

/// Why a device could not be named or opened.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text names no kind of device.
    #[error(
        "unknown device {text:?}; known are cuda, cuda:N, sim, sim:SIZE (such as sim:80GiB) and sim:PRESET (such \
         as sim:h100)"
    )]
    UnknownDevice {
        /// The text.
        text: String,
    },
    /// The program was built without the driver of such devices.
    #[error(
        "this program was built without {driver}: build aquifer with its feature `{feature}`{}",
        condition(feature)
    )]
    NotBuilt {
        /// The driver.
        driver: &'static str,
        /// The feature of the crate `aquifer` that brings it. It is on by default.
        feature: &'static str,
    },
    /// What follows `sim:` is wrong.
    #[cfg(feature = "sim")]
    #[error("in {text:?}: {cause}")]
    Sim {
        /// The whole text.
        text: String,
        /// What is wrong with it.
        cause: SimConfigError,
    },
    /// There are real GPUs, but none with that ordinal.
    #[error("there is no GPU {ordinal}; {}{}", listed(existing), visibility(visible))]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// The names of those that exist, by ordinal.
        existing: Vec<String>,
        /// Value of `CUDA_VISIBLE_DEVICES`, if it is set: it may hide some.
        visible: Option<String>,
    },
    /// No real GPU can be used at all.
    #[cfg(all(feature = "cuda", target_pointer_width = "64"))]
    #[error("no real GPU can be used: {0}; use sim for a simulated GPU")]
    Unavailable(aquifer_cuda::Unavailable),
    /// The host has no device memory to manage.
    #[error("cpu: the host has no device memory to manage; use sim for a simulated GPU")]
    Host,
    /// The driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

aquifer_device::debug_as_display!(OpenError);

/// The names of the devices that exist.
fn listed(existing: &[String]) -> String {
    let names: Vec<String> = existing.iter().enumerate().map(|(at, name)| format!("{at} ({name})")).collect();
    if names.is_empty() { "there are none".to_owned() } else { format!("there are: {}", names.join(", ")) }
}

fn visibility(visible: &Option<String>) -> String {
    visible.as_ref().map_or_else(String::new, |value| format!(" (CUDA_VISIBLE_DEVICES is {value:?})"))
}

/// What a feature needs beside itself.
fn condition(feature: &str) -> &'static str {
    if feature == "cuda" { ", on a 64-bit machine" } else { "" }
}

impl FromStr for DeviceSpec {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<DeviceSpec, OpenError> {
        let unknown = || OpenError::UnknownDevice { text: text.to_owned() };
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        match (kind, rest) {
            ("cuda", None) => Ok(DeviceSpec::Cuda(0)),
            ("cuda", Some(ordinal)) if ordinal.bytes().all(|byte| byte.is_ascii_digit()) => {
                ordinal.parse().map(DeviceSpec::Cuda).map_err(|_| unknown())
            }
            ("sim", Some("")) => Err(unknown()),
            #[cfg(feature = "sim")]
            ("sim", rest) => SimConfig::parse(rest.unwrap_or(""))
                .map(|config| DeviceSpec::Sim(Box::new(config)))
                .map_err(|mut cause| {
                    // Counted in the text that is quoted with it.
                    cause.offset += text.len() - rest.map_or(0, str::len);
                    OpenError::Sim { text: text.to_owned(), cause }
                }),
            #[cfg(not(feature = "sim"))]
            ("sim", _) => Err(OpenError::NotBuilt { driver: "the simulated GPU", feature: "sim" }),
            ("cpu", None) => Ok(DeviceSpec::Cpu),
            _ => Err(unknown()),
        }
    }
}

impl DeviceSpec {
    /// Opens the device, as [`open`] does.
    ///
    /// # Errors
    /// When there is no such device, or its driver fails.
    pub fn open(&self) -> Result<Device, OpenError> {
        fork::check(Operation::Init)?;
        match self {
            DeviceSpec::Cuda(ordinal) => gpu::open(*ordinal),
            #[cfg(feature = "sim")]
            DeviceSpec::Sim(config) => Ok(Device::new(SimDriver::new((**config).clone()))),
            DeviceSpec::Cpu => Err(OpenError::Host),
        }
    }
}

/// Properties of the real GPUs that can be used, or why none can. No GPU is opened for it, so
/// stream priorities are not included.
///
/// # Errors
/// When there is no driver, it does not work, or it shows no GPU.
pub fn gpus() -> Result<Vec<DeviceInfo>, OpenError> {
    gpu::all()
}

/// Opens the device that a text names, such as `cuda:0` or `sim:24GiB`: see
/// [`DeviceSpec`](crate::device::DeviceSpec) for all names.
///
/// A GPU has one device in a process. If it is open already, this returns another handle of that
/// device, with the same [`Device::id`]; the last handle closes it. Streams do not keep it open. A
/// simulated device is a new one each time.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// assert_eq!(device.info().total_bytes, 24 << 30);
/// assert_ne!(aquifer::open("sim:24GiB")?.id(), device.id());
/// println!("{}", aquifer::open("sim:lots").unwrap_err());
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// When the text names no device, there is no such device, or its driver fails.
pub fn open(spec: &str) -> Result<Device, Error> {
    Ok(spec.parse::<DeviceSpec>()?.open()?)
}

/// Opens the best device available: of the real GPUs that can be used, the one with the most
/// memory, else a simulated one of 80 GiB. [`Device::chosen_because`] says why, and so does the
/// log.
///
/// ```
/// let device = aquifer::open_best()?;
/// println!("{}: {}", device.label(), device.chosen_because().unwrap_or_default());
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// When the device chosen cannot be opened.
pub fn open_best() -> Result<Device, Error> {
    fork::check(Operation::Init)?;
    let (device, reason) = match gpu::best() {
        Ok((ordinal, reason)) => (gpu::open(ordinal)?, reason),
        Err(why) => instead_of_a_gpu(why)?,
    };
    device.note_choice(reason);
    tracing::info!(
        target: "aquifer::device",
        device = %device.label(),
        reason = device.chosen_because(),
        "a device was chosen"
    );
    Ok(device)
}

/// A simulated device where no real GPU can be used, and the reason.
#[cfg(feature = "sim")]
fn instead_of_a_gpu(why: OpenError) -> Result<(Device, String), OpenError> {
    Ok((Device::new(SimDriver::new(SimConfig::default())), why.to_string()))
}

#[cfg(not(feature = "sim"))]
fn instead_of_a_gpu(why: OpenError) -> Result<(Device, String), OpenError> {
    Err(why)
}

/// Real GPUs.
#[cfg(all(feature = "cuda", target_pointer_width = "64"))]
mod gpu {
    use aquifer_cuda::{Unavailable, shared, visible_devices};
    use aquifer_device::{Device, DeviceInfo};

    use super::OpenError;

    pub(super) fn all() -> Result<Vec<DeviceInfo>, OpenError> {
        aquifer_cuda::gpus().map_err(OpenError::Unavailable)
    }

    pub(super) fn open(ordinal: u32) -> Result<Device, OpenError> {
        let gpus = all()?;
        if gpus.iter().any(|info| info.ordinal == ordinal) {
            return Ok(shared(ordinal)?);
        }
        let existing = gpus.into_iter().map(|info| info.name).collect();
        Err(OpenError::NoSuchDevice { ordinal, existing, visible: visible_devices() })
    }

    /// The ordinal of the one with the most memory, and why it is the best.
    pub(super) fn best() -> Result<(u32, String), OpenError> {
        let gpus = all()?;
        best_of(&gpus).ok_or(OpenError::Unavailable(Unavailable::NoDevice))
    }

    pub(super) fn best_of(gpus: &[DeviceInfo]) -> Option<(u32, String)> {
        // The first of the largest ones.
        let best = gpus.iter().reduce(|best, other| if other.total_bytes > best.total_bytes { other } else { best })?;
        let others = match gpus.len() {
            1 => String::new(),
            several => format!(", which has the most memory of {several}"),
        };
        let shared = if best.shares_host_memory { " (memory shared with the host)" } else { "" };
        Some((best.ordinal, format!("a real GPU was found: {}{shared}{others}", best.name)))
    }
}

/// Stands in for CUDA where the program was built without it.
#[cfg(not(all(feature = "cuda", target_pointer_width = "64")))]
mod gpu {
    use aquifer_device::{Device, DeviceInfo};

    use super::OpenError;

    const NOT_BUILT: OpenError = OpenError::NotBuilt { driver: "CUDA", feature: "cuda" };

    pub(super) fn all() -> Result<Vec<DeviceInfo>, OpenError> {
        Err(NOT_BUILT)
    }

    pub(super) fn open(_ordinal: u32) -> Result<Device, OpenError> {
        Err(NOT_BUILT)
    }

    pub(super) fn best() -> Result<(u32, String), OpenError> {
        Err(NOT_BUILT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "sim")]
    fn names_of_devices_parse() {
        assert!(matches!("cuda".parse(), Ok(DeviceSpec::Cuda(0))));
        assert!(matches!("cuda:1".parse(), Ok(DeviceSpec::Cuda(1))));
        assert!(matches!("cpu".parse(), Ok(DeviceSpec::Cpu)));
        for (text, bytes) in [("sim", 80 << 30), ("sim:80GiB", 80 << 30), ("sim:81408MiB", 81408 << 20)] {
            let Ok(device) = text.parse::<DeviceSpec>().unwrap().open() else { panic!("{text}") };
            assert_eq!(device.info().total_bytes, bytes, "{text}");
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999", "cpu:0", "sim:x", "CUDA"] {
            assert!(text.parse::<DeviceSpec>().is_err(), "{text}");
        }
    }

    #[test]
    #[cfg(feature = "sim")]
    fn offsets_count_from_the_start_of_the_device_name() {
        let error = "sim:h100,foo=1".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(error.starts_with("in \"sim:h100,foo=1\": `foo` at byte 9: "), "{error}");
    }

    #[test]
    fn an_error_about_a_missing_device_lists_the_existing_ones() {
        let existing = vec!["A".to_owned(), "B".to_owned()];
        assert_eq!(listed(&[]), "there are none");
        let error = OpenError::NoSuchDevice { ordinal: 7, existing, visible: Some("3,4".to_owned()) };
        assert_eq!(error.to_string(), "there is no GPU 7; there are: 0 (A), 1 (B) (CUDA_VISIBLE_DEVICES is \"3,4\")");
        assert!(DeviceSpec::Cpu.open().unwrap_err().to_string().contains("host"));
        let error = open("cuda:4000000000").unwrap_err();
        let of_open = |is: fn(&OpenError) -> bool| matches!(&error, Error::Open(open) if is(open));
        #[cfg(all(feature = "cuda", target_pointer_width = "64"))]
        assert!(of_open(|open| matches!(open, OpenError::NoSuchDevice { .. } | OpenError::Unavailable(_))), "{error}");
        #[cfg(not(all(feature = "cuda", target_pointer_width = "64")))]
        assert!(of_open(|open| matches!(open, OpenError::NotBuilt { feature: "cuda", .. })), "{error}");
    }

    #[test]
    #[cfg(not(feature = "sim"))]
    fn a_build_without_the_simulated_gpu_says_so() {
        let error = open("sim:1GiB").unwrap_err().to_string();
        assert_eq!(error, "this program was built without the simulated GPU: build aquifer with its feature `sim`");
    }

    #[test]
    #[cfg(all(feature = "sim", feature = "cuda", target_pointer_width = "64"))]
    fn the_best_device_comes_with_a_reason() {
        let device = open_best().unwrap();
        let reason = device.chosen_because().unwrap();
        match aquifer_cuda::gpus() {
            Ok(_) => assert!(reason.contains(&device.info().name), "{reason}"),
            Err(unavailable) => {
                assert!(reason.contains(&unavailable.to_string()), "{reason}");
                assert_eq!(device.info().total_bytes, 80 << 30);
            }
        }
        assert_eq!(device.clone().chosen_because(), Some(reason));
    }

    #[test]
    #[cfg(all(feature = "cuda", target_pointer_width = "64"))]
    fn the_reason_says_whose_memory_the_best_gpu_has() {
        let mut gpus = [DeviceInfo::new("cuda", 0, "A", 48), DeviceInfo::new("cuda", 1, "B", 64)];
        gpus[1].shares_host_memory = true;
        let expected = "a real GPU was found: B (memory shared with the host), which has the most memory of 2";
        assert_eq!(gpu::best_of(&gpus), Some((1, expected.to_owned())));
    }

    #[test]
    #[cfg(feature = "sim")]
    fn each_simulated_device_is_a_new_one_and_takes_all_settings() {
        let device = open("sim:24GiB,violations=panic").unwrap();
        assert_eq!((device.info().total_bytes, device.chosen_because()), (24 << 30, None));
        assert_ne!(open("sim:24GiB").unwrap().id(), device.id());
        for wrong in ["", "lots", "24GiB,foo=1"] {
            assert!(open(&format!("sim:{wrong}")).is_err(), "{wrong}");
        }
    }
}

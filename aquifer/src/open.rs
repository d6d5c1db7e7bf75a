//! Finding and opening devices: by name, by ordinal, or the best one available.
//!
//! Nothing falls back silently: [`Device::best`] reports its choice and the reason, and the error
//! of a device that is not available lists those that are.

use std::fmt;
use std::str::FromStr;

#[cfg(all(feature = "cuda", target_pointer_width = "64"))]
use crate::cuda;
use crate::device::Device;
use crate::driver::DeviceInfo;
use crate::error::DeviceError;
use crate::fork;
use crate::sim::{SimConfig, SimConfigError, SimDriver};
use crate::unavailable::Unavailable;

/// The name of a device to open, as on a command line. [`Device::open`] parses one and opens it.
///
/// | text | device |
/// | --- | --- |
/// | `cuda`, `cuda:1` | a real GPU, by ordinal |
/// | `sim`, `sim:80GiB`, `sim:81408MiB`, `sim:h100`, `sim:24GiB,seed=7` | a simulated GPU; see [`SimConfig::parse`] |
/// | `cpu` | the host, which has no device memory to manage: the name parses, and opening it is an error that says so |
///
/// ```
/// use aquifer_device::DeviceSpec;
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
    /// What follows `sim:` is wrong.
    #[error("in {text:?}: {cause}")]
    Sim {
        /// The whole text.
        text: String,
        /// What is wrong with it.
        cause: SimConfigError,
    },
    /// There are real GPUs, but none with that ordinal.
    #[error("there is no GPU {ordinal}; {existing}{}", visibility(visible))]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// Which exist.
        existing: Existing,
        /// Value of `CUDA_VISIBLE_DEVICES`, if it is set: it may hide some.
        visible: Option<String>,
    },
    /// No real GPU can be used at all.
    #[error("no real GPU can be used: {0}")]
    Unavailable(Unavailable),
    /// The host has no device memory to manage.
    #[error("cpu: the host has no device memory to manage; use sim for a simulated GPU")]
    Host,
    /// The driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

crate::debug_as_display!(OpenError);

/// Names of the devices that exist, for messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Existing(pub Vec<String>);

impl fmt::Display for Existing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return write!(f, "there are none");
        }
        write!(f, "there are: ")?;
        for (ordinal, name) in self.0.iter().enumerate() {
            write!(f, "{}{ordinal} ({name})", if ordinal > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

fn visibility(visible: &Option<String>) -> String {
    visible.as_ref().map_or_else(String::new, |value| format!(" (CUDA_VISIBLE_DEVICES is {value:?})"))
}

/// Stands in for CUDA where the program was built without it.
#[cfg(not(all(feature = "cuda", target_pointer_width = "64")))]
mod cuda {
    use crate::device::Device;
    use crate::driver::DeviceInfo;
    use crate::error::Result;
    use crate::unavailable::Unavailable;

    pub(super) fn devices() -> Result<Vec<DeviceInfo>, Unavailable> {
        Err(Unavailable::NotBuilt)
    }

    pub(super) fn shared(_ordinal: u32) -> Result<Device> {
        Err(Unavailable::NotBuilt.into())
    }

    pub(super) fn visible_devices() -> Option<String> {
        None
    }
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
            ("sim", rest) => SimConfig::parse(rest.unwrap_or(""))
                .map(|config| DeviceSpec::Sim(Box::new(config)))
                .map_err(|mut cause| {
                    // Counted in the text that is quoted with it.
                    if cause.file.is_none() {
                        cause.offset += text.len() - rest.map_or(0, str::len);
                    }
                    OpenError::Sim { text: text.to_owned(), cause }
                }),
            ("cpu", None) => Ok(DeviceSpec::Cpu),
            _ => Err(unknown()),
        }
    }
}

impl DeviceSpec {
    /// Opens the device, as [`Device::open`] does.
    ///
    /// # Errors
    /// When there is no such device, or its driver fails.
    pub fn open(&self) -> Result<Device, OpenError> {
        if fork::is_child() {
            return Err(OpenError::Unavailable(Unavailable::Forked));
        }
        match self {
            DeviceSpec::Cuda(ordinal) => open_gpu(*ordinal),
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
pub fn gpus() -> Result<Vec<DeviceInfo>, Unavailable> {
    cuda::devices()
}

/// Properties of the real GPUs that can be used; [`gpus`] says why there are none.
pub fn available() -> Vec<DeviceInfo> {
    gpus().unwrap_or_default()
}

/// How many real GPUs can be used.
pub fn count() -> u32 {
    u32::try_from(available().len()).unwrap_or(u32::MAX)
}

/// Opens a real GPU by ordinal.
fn open_gpu(ordinal: u32) -> Result<Device, OpenError> {
    let gpus = gpus().map_err(OpenError::Unavailable)?;
    if gpus.iter().any(|info| info.ordinal == ordinal) {
        return Ok(cuda::shared(ordinal)?);
    }
    let existing = Existing(gpus.into_iter().map(|info| info.name).collect());
    Err(OpenError::NoSuchDevice { ordinal, existing, visible: cuda::visible_devices() })
}

/// The devices that a text names, and the best one.
impl Device {
    /// Opens the device that a text names, such as `cuda:0` or `sim:24GiB`: see [`DeviceSpec`] for
    /// all names.
    ///
    /// A GPU has one device in a process. If it is open already, this returns another handle of
    /// that device, with the same [`Device::id`]; the last handle closes it. Streams do not keep it
    /// open. A simulated device is a new one each time.
    ///
    /// ```
    /// use aquifer_device::Device;
    /// let device = Device::open("sim:24GiB")?;
    /// assert_eq!(device.info().total_bytes, 24 << 30);
    /// assert_ne!(Device::open("sim:24GiB")?.id(), device.id());
    /// println!("{}", Device::open("sim:lots").unwrap_err());
    /// # Ok::<(), aquifer_device::OpenError>(())
    /// ```
    ///
    /// # Errors
    /// When the text names no device, there is no such device, or its driver fails.
    pub fn open(spec: &str) -> Result<Device, OpenError> {
        spec.parse::<DeviceSpec>()?.open()
    }

    /// Opens a new simulated device of this size, with settings after it if need be:
    /// `Device::simulated("24GiB")` is short for `Device::open("sim:24GiB")`.
    ///
    /// ```
    /// use aquifer_device::Device;
    /// let device = Device::simulated("24GiB,violations=panic")?;
    /// assert_eq!(device.info().total_bytes, 24 << 30);
    /// # Ok::<(), aquifer_device::OpenError>(())
    /// ```
    ///
    /// # Errors
    /// When [`SimConfig::parse`] does not understand the text.
    pub fn simulated(size: &str) -> Result<Device, OpenError> {
        Device::open(&format!("sim:{size}"))
    }

    /// Opens the best device available: of the real GPUs that can be used, the one with the most
    /// memory, else a simulated one of 80 GiB. [`Device::chosen_because`] says why, and so does the
    /// log.
    ///
    /// ```
    /// use aquifer_device::Device;
    /// let device = Device::best()?;
    /// println!("{}: {}", device.label(), device.chosen_because().unwrap_or_default());
    /// # Ok::<(), aquifer_device::OpenError>(())
    /// ```
    ///
    /// # Errors
    /// When the device chosen cannot be opened.
    pub fn best() -> Result<Device, OpenError> {
        if fork::is_child() {
            return Err(OpenError::Unavailable(Unavailable::Forked));
        }
        let (device, reason) = match gpus() {
            Err(unavailable) => {
                let device = Device::new(SimDriver::new(SimConfig::default()));
                (device, format!("no real GPU can be used: {unavailable}"))
            }
            Ok(gpus) => {
                // The first of the largest ones.
                let best =
                    gpus.iter().reduce(|best, other| if other.total_bytes > best.total_bytes { other } else { best });
                let best = best.ok_or(OpenError::Unavailable(Unavailable::NoDevice))?;
                let others = match gpus.len() {
                    1 => String::new(),
                    several => format!(", which has the most memory of {several}"),
                };
                (open_gpu(best.ordinal)?, format!("a real GPU was found: {}{others}", best.name))
            }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
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
    fn offsets_count_from_the_start_of_the_device_name() {
        let error = "sim:h100,foo=1".parse::<DeviceSpec>().unwrap_err().to_string();
        assert!(error.starts_with("in \"sim:h100,foo=1\": `foo` at byte 9: "), "{error}");
    }

    #[test]
    fn an_error_about_a_missing_device_lists_the_existing_ones() {
        let existing = Existing(vec!["A".to_owned(), "B".to_owned()]);
        assert_eq!(existing.to_string(), "there are: 0 (A), 1 (B)");
        assert_eq!(Existing::default().to_string(), "there are none");
        let error = OpenError::NoSuchDevice { ordinal: 7, existing, visible: Some("3,4".to_owned()) };
        assert_eq!(error.to_string(), "there is no GPU 7; there are: 0 (A), 1 (B) (CUDA_VISIBLE_DEVICES is \"3,4\")");
        assert!(DeviceSpec::Cpu.open().unwrap_err().to_string().contains("host"));
        let error = "cuda:4000000000".parse::<DeviceSpec>().unwrap().open().unwrap_err();
        assert!(matches!(error, OpenError::NoSuchDevice { .. } | OpenError::Unavailable(_)), "{error}");
        assert_eq!(count() == 0, gpus().is_err());
    }

    #[test]
    fn the_best_device_comes_with_a_reason() {
        let device = Device::best().unwrap();
        let reason = device.chosen_because().unwrap();
        match gpus() {
            Ok(_) => assert!(reason.contains(&device.info().name), "{reason}"),
            Err(unavailable) => {
                assert!(reason.contains(&unavailable.to_string()), "{reason}");
                assert_eq!(device.info().total_bytes, 80 << 30);
            }
        }
        assert_eq!(device.clone().chosen_because(), Some(reason));
    }

    #[test]
    fn each_simulated_device_is_a_new_one_and_takes_all_settings() {
        let device = Device::simulated("24GiB,violations=panic").unwrap();
        assert_eq!((device.info().total_bytes, device.chosen_because()), (24 << 30, None));
        assert_ne!(Device::open("sim:24GiB").unwrap().id(), device.id());
        for wrong in ["", "lots", "24GiB,foo=1"] {
            assert!(Device::simulated(wrong).is_err(), "{wrong}");
        }
    }
}

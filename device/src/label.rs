//! Names of devices, for messages.
//!
//! Streams and memory identify their device by a number ([`crate::Device::id`]), and hot paths
//! compare nothing else. A name is needed only where two numbers differ: [`DeviceLabel::of`] finds
//! it among the names of the devices that are alive.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::fork::Mutex;

use crate::driver::DeviceInfo;

/// The name of a device for messages: the text with which `aquifer` opens it, and its
/// product name.
///
/// ```
/// let device = aquifer::open("sim:h100,ordinal=1")?;
/// assert_eq!(device.label().to_string(), "sim:1 (Simulated H100 80 GiB)");
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeviceLabel(Arc<Box<str>>); // One word: errors travel on fast paths.

/// Labels of the devices that are alive, by identity. A leaf: nothing is locked under it.
static ALIVE: Mutex<BTreeMap<u32, DeviceLabel>> = Mutex::new(BTreeMap::new());

impl DeviceLabel {
    /// The label of the device with this identity ([`crate::Device::id`],
    /// [`crate::Stream::device_id`]). Takes a lock that the whole process shares: for messages, not
    /// for hot paths.
    pub fn of(device_id: u32) -> DeviceLabel {
        let label = ALIVE.lock().get(&device_id).cloned();
        label.unwrap_or_else(|| DeviceLabel::new("a device that is closed"))
    }

    /// The text that opens the device, such as `cuda:1`, without its product name.
    ///
    /// ```
    /// let device = aquifer::open("sim:h100,ordinal=1")?;
    /// assert_eq!(device.label().spec(), "sim:1");
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn spec(&self) -> &str {
        self.0.split_once(" (").map_or(&self.0, |(spec, _)| spec)
    }

    fn new(text: impl Into<Box<str>>) -> DeviceLabel {
        DeviceLabel(Arc::new(text.into()))
    }

    /// Makes the label of a device known.
    pub(crate) fn open(device_id: u32, label: DeviceLabel) {
        ALIVE.lock().insert(device_id, label);
    }

    /// Forgets the label of a device that nothing belongs to any more.
    pub(crate) fn close(device_id: u32) {
        ALIVE.lock().remove(&device_id);
    }

    fn as_opened(&self, when: &str) -> DeviceLabel {
        DeviceLabel::new(format!("{self} as opened {when}"))
    }
}

impl From<&DeviceInfo> for DeviceLabel {
    fn from(info: &DeviceInfo) -> DeviceLabel {
        DeviceLabel::new(format!("{}:{} ({})", info.kind, info.ordinal, info.name))
    }
}

impl fmt::Display for DeviceLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A mismatch of devices: the device of the argument, and the one that was needed.
///
/// Opening a device twice gives two devices, which share nothing. Their labels say which of them
/// was opened first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMismatch {
    /// The device of the argument.
    pub is: DeviceLabel,
    /// The device that was needed.
    pub needed: DeviceLabel,
    /// Whether they are called the same.
    twice: bool,
}

impl DeviceMismatch {
    /// The labels of two devices, by identity. Boxed: errors travel on fast paths.
    ///
    /// ```
    /// use aquifer_device::DeviceMismatch;
    /// let (one, two) = (aquifer::open("sim:h100")?, aquifer::open("sim:h100")?);
    /// assert_eq!(
    ///     DeviceMismatch::between(two.id(), one.id()).to_string(),
    ///     "sim:0 (Simulated H100 80 GiB) as opened later, and this needs one of sim:0 (Simulated H100 80 GiB) as \
    ///      opened earlier; clone one `Device` instead of opening it twice",
    /// );
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn between(is: u32, needed: u32) -> Box<DeviceMismatch> {
        let earlier = is < needed;
        let (is, needed) = (DeviceLabel::of(is), DeviceLabel::of(needed));
        let twice = is == needed;
        let (is, needed) = match (twice, earlier) {
            (false, _) => (is, needed),
            (true, true) => (is.as_opened("earlier"), needed.as_opened("later")),
            (true, false) => (is.as_opened("later"), needed.as_opened("earlier")),
        };
        Box::new(DeviceMismatch { is, needed, twice })
    }
}

/// The text after "belongs to".
impl fmt::Display for DeviceMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let advice = if self.twice { "; clone one `Device` instead of opening it twice" } else { "" };
        write!(f, "{}, and this needs one of {}{advice}", self.is, self.needed)
    }
}

//! Chooses a device by requirements, and reports the reasons.
//!
//! No choice is silent: the result has the reason for every device that was not chosen, and the
//! host is chosen only if the caller allows it ([`Fallback::Host`]).

mod verdict;

use std::fmt;

use aquifer_allocator::{Allocator, Bytes};
use aquifer_device::{Device, DeviceInfo, DeviceSpec, gpus};
use aquifer_kernels::DType;

use crate::error::TransferError;
use crate::runtime::Transfer;
use verdict::Verdicts;
pub use verdict::{NoDevice, Refused, Verdict};

/// The fallback if no device serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fallback {
    /// An error with the reasons.
    #[default]
    Error,
    /// The host. The result reports it.
    Host,
}

/// Requirements on a device, by which one is chosen.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_kernels::DType;
/// use aquifer_transfer::{Fallback, Placement};
/// let open = |text: &str| Ok::<_, aquifer_device::sim::SimConfigError>(Device::new(SimDriver::new(SimConfig::parse(text)?)));
/// let devices = [open("8GiB")?, open("80GiB")?];
///
/// let choice = Placement::new().bytes(20 << 30).native(DType::BF16).choose(&devices)?;
/// assert_eq!(choice.index(), Some(1));
/// println!("{choice}"); // what was chosen and why, and why the other was not
///
/// let too_much = Placement::new().bytes(200 << 30);
/// assert!(too_much.choose(&devices).is_err());
/// assert_eq!(too_much.fallback(Fallback::Host).choose(&devices)?.index(), None); // the host, as it says
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is chosen before `choose` is called"]
pub struct Placement {
    bytes: u64,
    capability: (u32, u32),
    driver: Option<(u32, u32)>,
    native: Vec<DType>,
    fallback: Fallback,
}

/// A device that may be chosen, and the memory it would have.
#[derive(Clone, Debug)]
pub struct Candidate {
    device: Device,
    /// Adds its unused memory, and its limit.
    allocator: Option<Allocator>,
}

impl From<&Device> for Candidate {
    fn from(device: &Device) -> Candidate {
        Candidate { device: device.clone(), allocator: None }
    }
}

/// With an allocator, memory that it holds unused counts as free, and its limit applies.
impl From<&Allocator> for Candidate {
    fn from(allocator: &Allocator) -> Candidate {
        Candidate { device: allocator.device().clone(), allocator: Some(allocator.clone()) }
    }
}

/// With the allocator that the runtime takes memory from.
impl From<&Transfer> for Candidate {
    fn from(transfer: &Transfer) -> Candidate {
        Candidate::from(transfer.allocator())
    }
}

/// For lists of devices some of which have an allocator.
impl From<&Candidate> for Candidate {
    fn from(candidate: &Candidate) -> Candidate {
        candidate.clone()
    }
}

impl Candidate {
    /// Bytes that could be allocated, if they were in one piece.
    pub(crate) fn free(&self) -> Result<u64, TransferError> {
        let on_device = self.device.memory_info()?.free;
        let Some(allocator) = &self.allocator else { return Ok(on_device) };
        let (allocated, reserved) = (allocator.memory_allocated(), allocator.memory_reserved());
        let growth = allocator.limit().map_or(on_device, |limit| on_device.min(limit.saturating_sub(reserved)));
        Ok(growth.saturating_add(reserved.saturating_sub(allocated)))
    }
}

/// The choice. Its `Display` lists the reasons for every device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Chosen {
    device: Option<(usize, Device)>,
    needed: u64,
    /// The verdict on each device, in the order of the candidates.
    pub verdicts: Vec<Verdict>,
}

impl Placement {
    /// No requirements, and never the host.
    pub fn new() -> Placement {
        Placement::default()
    }

    /// Bytes of device memory that it needs.
    pub fn bytes(self, bytes: u64) -> Placement {
        Placement { bytes, ..self }
    }

    /// The least compute capability, major and minor number.
    pub fn capability(self, capability: (u32, u32)) -> Placement {
        Placement { capability, ..self }
    }

    /// The oldest CUDA version that the driver must know, major and minor number. Simulated devices
    /// have no driver that could be too old.
    pub fn driver(self, version: (u32, u32)) -> Placement {
        Placement { driver: Some(version), ..self }
    }

    /// A dtype that the device must support natively ([`DType::is_native_on`]).
    pub fn native(mut self, dtype: DType) -> Placement {
        self.native.push(dtype);
        self
    }

    /// The fallback if no device serves.
    pub fn fallback(self, fallback: Fallback) -> Placement {
        Placement { fallback, ..self }
    }

    /// Chooses among open devices, their allocators or runtimes, or [`Candidate`]s made of any of
    /// these: of those that meet the requirements, the one with the most free memory, or the first
    /// of several.
    ///
    /// # Errors
    /// [`TransferError::NoDevice`] when none serves, unless the host may be used instead.
    pub fn choose<'a, C>(&self, candidates: &'a [C]) -> Result<Chosen, TransferError>
    where
        &'a C: Into<Candidate>,
    {
        let candidates: Vec<Candidate> = candidates.iter().map(Into::into).collect();
        let verdicts: Vec<Verdict> = candidates.iter().map(|candidate| self.judge(candidate)).collect();
        let most = most_free(&verdicts);
        self.decide(verdicts, most.map(|index| (index, candidates[index].device.clone())))
    }

    /// Chooses among the real GPUs of this machine, which it opens one after the other. If there is
    /// none at all, the error, or the choice of the host, says why.
    ///
    /// # Errors
    /// As [`Placement::choose`], and [`TransferError::NoGpu`].
    pub fn choose_gpu(&self) -> Result<Chosen, TransferError> {
        let infos = match gpus() {
            Ok(infos) => infos,
            Err(unavailable) if self.fallback == Fallback::Host => {
                tracing::info!(%unavailable, "no real GPU can be used; the host was chosen, as the caller allowed");
                return Ok(Chosen { device: None, needed: self.bytes, verdicts: Vec::new() });
            }
            Err(unavailable) => return Err(TransferError::NoGpu(unavailable)),
        };
        let opened: Vec<_> = infos.iter().map(|info| DeviceSpec::Cuda(info.ordinal).open()).collect();
        let judge = |(info, opened): (&DeviceInfo, &Result<Device, _>)| match opened {
            Ok(device) => self.judge(&device.into()),
            Err(error) => {
                let refusals = vec![Refused::Failed(format!("{error}"))];
                Verdict { info: info.clone(), free: None, refusals }
            }
        };
        let verdicts: Vec<Verdict> = infos.iter().zip(&opened).map(judge).collect();
        let most = most_free(&verdicts);
        let device = most.and_then(|index| opened[index].as_ref().ok().map(|device| (index, device.clone())));
        self.decide(verdicts, device)
    }

    /// Spreads parts over devices so that their free memory stays as even as possible: each part,
    /// the largest first, goes to the suitable device with the most memory left. Returns the index
    /// of each part's device, in the order of the parts. [`Placement::bytes`] is what each device
    /// must have free in addition. Candidates are taken for different devices: name each device
    /// once, or its memory counts twice.
    ///
    /// # Errors
    /// [`TransferError::NoDevice`] when some part fits nowhere. Parts are never put on the host.
    pub fn spread<'a, C>(&self, candidates: &'a [C], parts: &[u64]) -> Result<Vec<usize>, TransferError>
    where
        &'a C: Into<Candidate>,
    {
        let verdicts: Vec<Verdict> = candidates.iter().map(|candidate| self.judge(&candidate.into())).collect();
        let left = |verdict: &Verdict| {
            let free = verdict.free.filter(|_| verdict.refusals.is_empty())?;
            Some(free.saturating_sub(self.bytes))
        };
        let mut left: Vec<Option<u64>> = verdicts.iter().map(left).collect();
        let mut places = vec![0; parts.len()];
        let mut largest_first: Vec<usize> = (0..parts.len()).collect();
        largest_first.sort_by_key(|&part| std::cmp::Reverse(parts[part]));
        for part in largest_first {
            let fits = |&(_, left): &(usize, u64)| left >= parts[part];
            let most = left.iter().enumerate().filter_map(|(index, left)| Some((index, (*left)?))).filter(fits);
            let Some((index, free)) = most.max_by_key(|&(index, free)| (free, std::cmp::Reverse(index))) else {
                return Err(TransferError::NoDevice(Box::new(NoDevice {
                    verdicts: lacking(verdicts, &left, parts[part]),
                })));
            };
            left[index] = Some(free - parts[part]);
            places[part] = index;
        }
        Ok(places)
    }

    fn decide(&self, verdicts: Vec<Verdict>, device: Option<(usize, Device)>) -> Result<Chosen, TransferError> {
        if device.is_none() && self.fallback == Fallback::Error {
            return Err(TransferError::NoDevice(Box::new(NoDevice { verdicts })));
        }
        let chosen = Chosen { device, needed: self.bytes, verdicts };
        tracing::info!(%chosen, "a place was chosen");
        Ok(chosen)
    }

    fn judge(&self, candidate: &Candidate) -> Verdict {
        self.judge_by(candidate.device.info().clone(), candidate.free())
    }

    fn judge_by(&self, info: DeviceInfo, free: Result<u64, TransferError>) -> Verdict {
        let has = info.compute_capability;
        let mut refusals = Vec::new();
        if has < self.capability {
            refusals.push(Refused::Capability { needed: self.capability, has });
        }
        let missing = self.native.iter().filter(|dtype| !dtype.is_native_on(has));
        refusals.extend(missing.filter_map(|&dtype| Some(Refused::DType { dtype, missing: dtype.missing_on(has)? })));
        if let (Some(needed), Some(has)) = (self.driver, info.driver_version)
            && has < needed
        {
            refusals.push(Refused::Driver { needed, has });
        }
        match &free {
            Ok(free) if *free < self.bytes => refusals.push(Refused::Memory { needed: self.bytes, free: *free }),
            Ok(_) => {}
            Err(error) => refusals.push(Refused::Failed(format!("its free memory is unknown: {error}"))),
        }
        Verdict { info, free: free.ok(), refusals }
    }
}

/// The first of those with most free memory that serve.
fn most_free(verdicts: &[Verdict]) -> Option<usize> {
    let serve = verdicts.iter().enumerate().filter(|(_, verdict)| verdict.refusals.is_empty());
    serve.max_by_key(|(index, verdict)| (verdict.free, std::cmp::Reverse(*index))).map(|(index, _)| index)
}

/// Verdicts on a part that fits nowhere, with the memory that earlier parts left free.
fn lacking(mut verdicts: Vec<Verdict>, left: &[Option<u64>], needed: u64) -> Vec<Verdict> {
    for (verdict, left) in verdicts.iter_mut().zip(left) {
        if let Some(free) = *left {
            verdict.refusals.push(Refused::Memory { needed, free });
        }
    }
    verdicts
}

impl Chosen {
    /// The device; `None` where the host was chosen.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref().map(|(_, device)| device)
    }

    /// The device's place among those given; `None` where the host was chosen.
    pub fn index(&self) -> Option<usize> {
        self.device.as_ref().map(|&(index, _)| index)
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device {
            Some((index, device)) => {
                let free = self.verdicts.get(*index).and_then(|verdict| verdict.free).unwrap_or(0);
                let needed = Bytes(self.needed);
                write!(
                    f,
                    "chosen: {}, with {} free for the {needed} needed, the most of those that serve",
                    device.label(),
                    Bytes(free)
                )?;
            }
            None if self.verdicts.is_empty() => f.write_str("chosen: the host, as there is no device")?,
            None => f.write_str("chosen: the host, as no device serves")?,
        }
        if self.verdicts.len() > usize::from(self.device.is_some()) {
            write!(f, "; {}", Verdicts { all: &self.verdicts, except: self.index() })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! Allocators for recorded programs, made from the options of a session.

use std::sync::Arc;

use aquifer::Device;
use aquifer_sim::Lagging;
use aquifer_trace::{Aquifer, Measured, Observed, PyTorch};

use crate::cli::ConfigArg;
use crate::exit::Failure;
use crate::session::Session;

/// An allocator that can be made from options.
pub trait Opened: Measured + Sized {
    /// An allocator for `device`, with `streams` streams: stream 0 is the default stream. `lag` is
    /// that of the device, if the events of a program are its clock.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    fn with_lag(
        session: &Session,
        device: &Device,
        config: &ConfigArg,
        streams: usize,
        lag: Option<Arc<Lagging>>,
    ) -> Result<Self, Failure>;

    /// The same on a device that does not lag.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    fn open(session: &Session, device: &Device, config: &ConfigArg, streams: usize) -> Result<Self, Failure> {
        Self::with_lag(session, device, config, streams, None)
    }

    /// An allocator on a new device that lags behind by `lag` events; on the bare device if that is
    /// 0.
    ///
    /// # Errors
    /// Those of the allocator and the driver; a device that cannot be made to lag.
    fn lagging(session: &Session, config: &ConfigArg, streams: usize, lag: u64) -> Result<Self, Failure> {
        match if lag > 0 { session.open_lagging(lag)? } else { None } {
            Some(lagged) => Self::with_lag(session, &lagged.device, config, streams, Some(lagged.lag)),
            None => Self::open(session, &session.open()?, config, streams),
        }
    }

    /// An allocator under observation, on a new device. A simulated one lags by `lag` events.
    ///
    /// # Errors
    /// Those of the allocator and the driver; a real device cannot be made to lag.
    fn observed(session: &Session, config: &ConfigArg, streams: usize, lag: u64) -> Result<Observed<Self>, Failure> {
        let simulated = session.open_lagging(lag)?;
        let device = simulated.as_ref().map_or_else(|| session.open(), |simulated| Ok(simulated.device.clone()))?;
        let subject = Self::open(session, &device, config, streams)?;
        Ok(Observed::new(subject, device, simulated))
    }
}

impl Opened for Aquifer {
    fn with_lag(
        session: &Session,
        device: &Device,
        config: &ConfigArg,
        streams: usize,
        lag: Option<Arc<Lagging>>,
    ) -> Result<Aquifer, Failure> {
        Ok(Aquifer::new(session.allocator(device, config)?, streams, lag)?)
    }
}

impl Opened for PyTorch {
    fn with_lag(
        _: &Session,
        device: &Device,
        config: &ConfigArg,
        streams: usize,
        lag: Option<Arc<Lagging>>,
    ) -> Result<PyTorch, Failure> {
        let options = config.pytorch.clone().unwrap_or_default();
        if lag.is_some() && options.expandable_segments {
            return Err(Failure::Usage("--lag is not reproduced with backing:expandable: leave it out".to_owned()));
        }
        let memory = device.memory_info()?;
        let limit = config.config.limit_bytes(memory.total, memory.free);
        Ok(PyTorch::new(device, options, limit, streams, lag)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;

    #[test]
    fn other_options_and_commands_are_refused() {
        for odd in
            ["backing:expandable,max_split_size_mb:128", "backing:pytorch,expandable_segments:True,backing:paged"]
        {
            assert!(odd.parse::<ConfigArg>().is_err(), "{odd}");
        }
        let config: ConfigArg = "expandable_segments:True, backing:pytorch".parse().unwrap();
        assert!(config.is_same(&"backing:expandable".parse().unwrap()));
        assert!("expandable_segments:True".parse::<ConfigArg>().unwrap().pytorch.is_none());
        let session = Session::new(&Global::default()).unwrap();
        assert!(session.allocator(&session.open().unwrap(), &config).is_err());
        assert!(PyTorch::lagging(&session, &config, 1, 1).is_err());
    }
}

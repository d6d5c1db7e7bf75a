//! What the environment says about the driver: which devices there are, how old it is, what it
//! lacks, what fails.

use aquifer_sim::SimConfig;

use crate::fail::Order;

/// Devices, separated by `;`: each as after `sim:`, such as `24GiB,seed=7;h100`, with or without
/// that prefix. `none` for none.
pub(crate) const DEVICES: &str = "AQUIFER_STANDIN_DEVICES";
/// The CUDA version that the driver claims, as `1000 * major + 10 * minor`.
pub(crate) const VERSION: &str = "AQUIFER_STANDIN_VERSION";
/// Functions that the driver lacks in addition to those newer than its version, separated by
/// commas.
pub(crate) const WITHOUT: &str = "AQUIFER_STANDIN_WITHOUT";
/// Faults that every device of the environment has from the start, as settings of a simulated
/// device: `fault=…,lost_at=…`.
pub(crate) const FAULTS: &str = "AQUIFER_STANDIN_FAULTS";
/// Functions that fail, separated by `;`: `FUNCTION#N:CODE`.
pub(crate) const FAIL: &str = "AQUIFER_STANDIN_FAIL";
/// The id under which NVML lists this process, where it is not its own: that of another namespace.
const PID: &str = "AQUIFER_STANDIN_PID";
/// Which of the devices are visible, as CUDA has it: ordinals separated by commas; what follows an
/// unknown one is invisible.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The device there is by default.
const DEFAULT_DEVICE: &str = "24GiB";

/// The version claimed by default: 13.0, the one that brought the newest function here.
pub(crate) const DEFAULT_VERSION: u32 = 13000;

/// The environment, read once.
#[derive(Clone, Debug)]
pub(crate) struct Environment {
    pub(crate) devices: Vec<SimConfig>,
    pub(crate) version: u32,
    pub(crate) without: Vec<String>,
    pub(crate) orders: Vec<Order>,
    pub(crate) pid: u32,
}

impl Environment {
    /// Reads the process's environment.
    pub(crate) fn read() -> Result<Environment, String> {
        Environment::from(|name| std::env::var(name).ok())
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Environment, String> {
        let (listed, faults) = (variable(DEVICES).unwrap_or_default(), variable(FAULTS));
        let devices = match listed.trim() {
            "none" => Vec::new(),
            listed => {
                let listed = if listed.is_empty() { DEFAULT_DEVICE } else { listed };
                listed.split(';').map(|text| device(text, faults.as_deref())).collect::<Result<_, _>>()?
            }
        };
        Ok(Environment {
            devices: visible(devices, variable(VISIBLE).as_deref()),
            version: version(variable(VERSION).as_deref())?,
            without: list(variable(WITHOUT).as_deref(), ','),
            orders: orders(variable(FAIL).as_deref())?,
            pid: pid(variable(PID).as_deref())?,
        })
    }
}

/// A device as configured, with faults added.
pub(crate) fn device(text: &str, faults: Option<&str>) -> Result<SimConfig, String> {
    let text = text.trim();
    let text = text.strip_prefix("sim:").unwrap_or(if text == "sim" { "" } else { text });
    let whole = match faults.map(str::trim).filter(|faults| !faults.is_empty()) {
        Some(faults) => format!("{text},{faults}"),
        None => text.to_owned(),
    };
    match SimConfig::parse(&whole) {
        Ok(config) if config.panic_on_violation => {
            Err(format!("device {whole:?}: no panic may cross the ABI; use violations=report"))
        }
        read => read.map_err(|error| format!("device {whole:?}: {error}")),
    }
}

fn list(text: Option<&str>, separator: char) -> Vec<String> {
    let parts = text.unwrap_or_default().split(separator).map(str::trim);
    parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn orders(text: Option<&str>) -> Result<Vec<Order>, String> {
    let wanted = |part: &str| format!("{FAIL}: {part:?} is not FUNCTION#N:CODE, such as cuInit#1:999");
    list(text, ';').iter().map(|part| Order::parse(part).ok_or_else(|| wanted(part))).collect()
}

fn pid(text: Option<&str>) -> Result<u32, String> {
    let wrong = |text: &str| format!("{PID}: {text:?} is not the id of a process");
    text.map_or(Ok(std::process::id()), |text| text.trim().parse().map_err(|_| wrong(text)))
}

fn version(text: Option<&str>) -> Result<u32, String> {
    match text {
        None => Ok(DEFAULT_VERSION),
        Some(text) => text.trim().parse().map_err(|_| format!("{VERSION}: {text:?} is not a version such as 12080")),
    }
}

fn visible(devices: Vec<SimConfig>, chosen: Option<&str>) -> Vec<SimConfig> {
    let Some(chosen) = chosen else { return devices };
    let places = chosen.split(',').map_while(|text| text.trim().parse::<usize>().ok());
    places.map_while(|place| devices.get(place).cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, String> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Environment::from(find)
    }

    fn capacities(variables: &[(&str, &str)]) -> Vec<u64> {
        read(variables).unwrap().devices.iter().map(|device| device.capacity_bytes >> 30).collect()
    }

    #[test]
    fn by_default_there_is_one_device() {
        let environment = read(&[]).unwrap();
        assert_eq!((environment.devices.len(), environment.version), (1, DEFAULT_VERSION));
        assert!(environment.without.is_empty() && environment.orders.is_empty());
    }

    #[test]
    fn devices_are_listed_and_chosen() {
        assert_eq!(capacities(&[(DEVICES, "8GiB,seed=3;sim:h100; sim")]), [8, 80, 80]);
        assert!(capacities(&[(DEVICES, "none")]).is_empty());
        let three = (DEVICES, "1GiB;2GiB;3GiB");
        for (chosen, left) in [("", &[][..]), ("2,0", &[3, 1]), ("1,-1,0", &[2]), ("7", &[]), ("0, 2", &[1, 3])] {
            assert_eq!(capacities(&[three, (VISIBLE, chosen)]), left, "{chosen}");
        }
    }

    #[test]
    fn faults_are_those_of_every_device() {
        for devices in [None, Some((DEVICES, "8GiB;h100"))] {
            let faults = (FAULTS, "fault=cuMemAlloc#3:out_of_memory,lost_at=9");
            let variables: Vec<_> = devices.into_iter().chain([faults]).collect();
            let environment = read(&variables).unwrap();
            assert!(environment.devices.iter().all(|device| device.faults.len() == 2), "{environment:?}");
        }
    }

    #[test]
    fn values_that_make_no_sense_are_named() {
        for (name, value) in
            [(DEVICES, "8GiB;huge"), (VERSION, "new"), (PID, "me"), (FAIL, "cuInit"), (FAULTS, "fault=x")]
        {
            let error = read(&[(name, value)]).unwrap_err();
            let part = value.rsplit([';', '=']).next().unwrap();
            assert!(error.contains(part), "{error}");
        }
    }
}

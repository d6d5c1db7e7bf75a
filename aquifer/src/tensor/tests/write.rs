//! Writing views in place, against lists of numbers on the host.

use aquifer_device::RequestError;

use super::*;

/// A tensor on a device with its elements' numbers.
fn numbered(stand: &Stand, shape: &[usize]) -> Tensor {
    counting(shape).to(&stand.transfer).unwrap().wait().unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}

#[test]
fn views_are_written_from_every_place_and_other_elements_stay() {
    let stands = [stand(), stand_with(SimConfig::default().ordinal(1))];
    let (transfer, stream) = (&stands[0].transfer, &stands[0].stream);
    // Small and large, as ordinary memory is staged then.
    for rows in [5usize, 300_000] {
        let host = counting(&[rows, 2]);
        for place in [Place::Host, transfer.pinned().into(), transfer.into(), Place::from(&stands[1].transfer)] {
            let from = host.to(&place).unwrap().wait().unwrap();
            let base = Tensor::full(&[rows, 4], -1.0f32, transfer).unwrap();
            let mut columns = base.narrow(1, 1..3).unwrap();
            // The copy goes on after the drop.
            drop(columns.copy_from(&from, stream).unwrap());
            let mut column = base.select(1, 3).unwrap();
            drop(column.copy_from(&from.select(1, 1).unwrap(), stream).unwrap());
            let expected: Vec<f32> = (0..rows)
                .flat_map(|row| [-1.0, (2 * row) as f32, (2 * row + 1) as f32, (2 * row + 1) as f32])
                .collect();
            assert_eq!(floats(&base), expected, "{rows} rows from {place}");
        }
    }
}

#[test]
fn tensors_dense_at_both_ends_cross_without_further_memory() {
    let stands = [stand(), stand_with(SimConfig::default().ordinal(1))];
    let (transfer, stream) = (&stands[0].transfer, &stands[0].stream);
    let host = counting(&[512, 1024]);
    for place in [Place::Host, transfer.pinned().into(), transfer.into(), Place::from(&stands[1].transfer)] {
        // Both ends may have the dimensions in reverse order.
        for turned in [false, true] {
            let way = |tensor: Tensor| if turned { tensor.transpose(0, 1).unwrap() } else { tensor };
            let from = way(host.to(&place).unwrap().wait().unwrap());
            let mut to = way(Tensor::zeros(&[512, 1024], DType::F32, transfer).unwrap());
            let peak = transfer.allocator().memory_allocated();
            let launches = stands[0].device.driver_calls().of(Operation::Launch);
            to.copy_from(&from, stream).unwrap().wait().unwrap();
            assert_eq!(transfer.allocator().memory_allocated(), peak);
            assert_eq!(stands[0].device.driver_calls().of(Operation::Launch), launches, "from {place}");
            assert_eq!(floats(&to), floats(&from), "from {place}");
        }
    }
}

#[test]
fn overlapping_tensors_are_read_before_they_are_written() {
    let stand = stand();
    let stream = &stand.stream;
    for (from, to) in [(0..8usize, 2..10usize), (2..10, 0..8), (0..10, 0..10), (0..5, 5..10)] {
        let base = numbered(&stand, &[10, 3]);
        let mut target = base.narrow(0, to.clone()).unwrap();
        drop(target.copy_from(&base.narrow(0, from.clone()).unwrap(), stream).unwrap());
        let mut expected: Vec<f32> = (0..30).map(|n| n as f32).collect();
        let at = |row: usize| row * 3;
        expected.copy_within(at(from.start)..at(from.end), at(to.start));
        assert_eq!(floats(&base), expected, "{from:?} to {to:?}");
    }
    // To itself, transposed; columns between others; and everything from one element of it.
    let base = numbered(&stand, &[3, 3]);
    drop(base.clone().copy_from(&base.transpose(0, 1).unwrap(), stream).unwrap());
    assert_eq!(floats(&base), [0.0, 3.0, 6.0, 1.0, 4.0, 7.0, 2.0, 5.0, 8.0]);
    let base = numbered(&stand, &[2, 4]);
    let pairs = base.reshape(&[2, 2, 2]).unwrap();
    drop(pairs.select(2, 1).unwrap().copy_from(&pairs.select(2, 0).unwrap(), stream).unwrap());
    assert_eq!(floats(&base), [0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]);
    let one = base.select(0, 1).unwrap().narrow(0, 3..4).unwrap().broadcast(&[2, 4]).unwrap();
    drop(base.clone().copy_from(&one, stream).unwrap());
    assert_eq!(floats(&base), [6.0; 8]);
}

#[test]
fn views_are_filled_and_other_elements_stay() {
    let stand = stand();
    let base = Tensor::zeros(&[4, 5], DType::BF16, &stand.transfer).unwrap();
    let mut inner = base.narrow(0, 1..3).unwrap().narrow(1, 1..4).unwrap().transpose(0, 1).unwrap();
    inner.fill(bf16::ONE, &stand.stream).unwrap();
    let ones: Vec<u64> = (0..20).filter(|n| (1..3).contains(&(n / 5)) && (1..4).contains(&(n % 5))).collect();
    let expected: Vec<bf16> = (0..20u64).map(|n| if ones.contains(&n) { bf16::ONE } else { bf16::ZERO }).collect();
    assert_eq!(base.to_vec::<bf16>().unwrap(), expected);
    // More dimensions than one launch takes, which cannot be merged.
    let base = numbered(&stand, &[4, 4, 4, 4, 4, 4]);
    let mut inner = (0..6).fold(base.clone(), |view, dimension| view.narrow(dimension, 1..3).unwrap());
    inner.fill(-1.0f32, &stand.stream).unwrap();
    assert_eq!(floats(&inner), [-1.0; 64]);
    assert_eq!(floats(&base).iter().filter(|&&n| n == -1.0).count(), 64);
    let mut turned = base.transpose(0, 5).unwrap();
    turned.fill(3.0f32, &stand.stream).unwrap();
    assert_eq!(floats(&base), vec![3.0; 4096]);
    let mut none = base.narrow(3, 2..2).unwrap();
    none.fill(9.0f32, &stand.stream).unwrap();
    let empty = counting(&[4, 4, 4, 0, 4, 4]);
    none.copy_from(&empty, &stand.stream).unwrap().wait().unwrap();
    assert_eq!(floats(&base), vec![3.0; 4096]);
}

#[test]
fn unwritable_tensors_are_refused_with_every_operand_named() {
    let stands = [stand(), stand_with(SimConfig::default().ordinal(1))];
    let stream = &stands[0].stream;
    let (host, there) = (counting(&[2, 3]), numbered(&stands[0], &[2, 3]));
    let pinned = host.pin(stands[0].transfer.pinned()).unwrap().wait().unwrap();
    let half = there.cast(DType::F16, stream).unwrap();
    let repeated = there.select(0, 0).unwrap().broadcast(&[2, 3]).unwrap();
    let cases = [
        (&host, &there, ["host memory never changes", "to: f32 [2, 3] on cpu", "from: f32 [2, 3] on sim:0"]),
        (&pinned, &host, ["host memory never changes", "to: f32 [2, 3] on pinned cpu", "from: f32 [2, 3] on cpu"]),
        (&there, &half, ["one dtype", "to: f32 [2, 3] on sim:0", "from: f16 [2, 3] on sim:0"]),
        (&repeated, &host, ["at one place", "to: f32 [2, 3] on sim:0", "from: f32 [2, 3] on cpu"]),
    ];
    for (to, from, parts) in cases {
        let error = to.clone().copy_from(from, stream).unwrap_err();
        assert!(matches!(error, Error::Operands { .. }), "{error:?}");
        for part in parts {
            assert!(error.to_string().contains(part), "{part:?}: {error}");
        }
    }
    let row = counting(&[3]);
    let error = there.clone().copy_from(&row, stream).unwrap_err().to_string();
    assert!(error.contains("from: f32 [3] on cpu") && error.contains("Tensor::broadcast"), "{error}");
    assert!(matches!(
        there.clone().copy_from(&host, &stands[1].stream),
        Err(Error::Request(RequestError::WrongDevice { what: "stream", .. }))
    ));
    assert!(matches!(repeated.clone().fill(0.0f32, stream), Err(Error::Operands { .. })));
    assert!(matches!(host.clone().fill(0.0f32, stream), Err(Error::Operands { .. })));
    assert_eq!(floats(&there), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    drop(there.clone().copy_from(&row.broadcast(&[2, 3]).unwrap(), stream).unwrap());
    assert_eq!(floats(&there), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
}

#[test]
fn deep_copies_share_nothing() {
    let stand = stand();
    for place in [Place::Host, Place::from(stand.transfer.pinned()), Place::from(&stand.transfer)] {
        let tensor = counting(&[3, 4]).to(&place).unwrap().wait().unwrap();
        for view in [tensor.clone(), tensor.transpose(0, 1).unwrap(), tensor.narrow(1, 2..2).unwrap()] {
            let copy = view.deep_copy().unwrap();
            assert!(copy.is_contiguous() && copy.place().is_same(&place) && !copy.shares_memory_with(&view));
            assert_eq!((copy.shape(), copy.dtype()), (view.shape(), view.dtype()));
            assert_eq!(bytes(&copy), bytes(&view));
        }
    }
    let there = numbered(&stand, &[6]);
    let before = there.deep_copy().unwrap();
    there.clone().fill(9.0f32, &stand.stream).unwrap();
    assert_eq!((floats(&before), floats(&there)), ((0..6u8).map(f32::from).collect(), vec![9.0; 6]));
}

#[test]
fn a_failed_write_leaves_everything_usable() {
    for call in 1..10 {
        let driver = SimDriver::new(SimConfig::default().jitter(false));
        let device = Device::new(driver.clone());
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let stream = device.stream().unwrap();
        transfer.allocator().kernels().unwrap();
        let base = Tensor::zeros(&[64, 64], DType::F32, &transfer).unwrap();
        let from = counting(&[64, 32]);
        driver.inject(Fault::Nth { operation: None, nth: call, code: Code::OUT_OF_MEMORY });
        let written = base.narrow(1, 0..32).unwrap().copy_from(&from, &stream).and_then(|pending| pending.wait());
        driver.clear_faults();
        let again = base.narrow(1, 0..32).unwrap().copy_from(&from, &stream).unwrap();
        again.wait().unwrap();
        assert_eq!(bytes(&base.narrow(1, 0..32).unwrap()), bytes(&from), "call {call}: {written:?}");
        assert_eq!(floats(&base.narrow(1, 32..64).unwrap()), vec![0.0; 64 * 32], "call {call}");
        drop(base);
        device.synchronize().unwrap();
        assert_eq!(allocator.memory_allocated(), 0, "call {call}");
        assert_eq!(device.driver().take_violation(), None, "call {call}");
    }
}

/// One write of a program: a part of a block of six dimensions in some order, and its new elements.
#[derive(Clone, Debug)]
struct Write {
    lengths: Vec<usize>,
    starts: Vec<usize>,
    order: Vec<usize>,
    what: What,
    stream: usize,
}

#[derive(Clone, Debug)]
enum What {
    Fill(f32),
    /// A part of the same block, which begins elsewhere.
    Own(Vec<usize>),
    /// One element of the same block.
    One(Vec<usize>),
    /// Numbers from here on, in a place.
    Numbers(u16, u8),
}

const SHAPE: [usize; 6] = [3, 2, 4, 2, 3, 5];

/// A length for each dimension, and a place where so many begin.
fn part() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    // Often all of a dimension, so that parts are dense, too; seldom nothing, as one such dimension
    // leaves no elements.
    let length = |extent: usize| prop_oneof![15 => Just(extent), 15 => 1..=extent, 1 => Just(0)];
    let dimension =
        move |extent: usize| length(extent).prop_flat_map(move |length| (Just(length), 0..=extent - length));
    SHAPE.map(dimension).to_vec().prop_map(|parts| parts.into_iter().unzip())
}

fn write() -> impl Strategy<Value = Write> {
    let what = |lengths: &[usize]| {
        let starts = |lengths: &[usize]| -> Vec<_> {
            SHAPE.iter().zip(lengths).map(|(extent, length)| 0..=extent - length).collect()
        };
        prop_oneof![
            any::<i8>().prop_map(|value| What::Fill(f32::from(value))),
            starts(lengths).prop_map(What::Own),
            starts(&[1; 6]).prop_map(What::One),
            (0u16..1000, 0u8..4).prop_map(|(first, place)| What::Numbers(first, place)),
        ]
    };
    let order = Just((0..6).collect::<Vec<usize>>()).prop_shuffle();
    (part(), order, 0usize..3).prop_flat_map(move |((lengths, starts), order, stream)| {
        what(&lengths).prop_map(move |what| Write {
            lengths: lengths.clone(),
            starts: starts.clone(),
            order: order.clone(),
            what,
            stream,
        })
    })
}

/// The part of a tensor that begins somewhere, in an order of its dimensions.
fn seen(tensor: &Tensor, starts: &[usize], lengths: &[usize], order: &[usize]) -> Tensor {
    let parts = starts.iter().zip(lengths).enumerate();
    let part = parts.fold(tensor.clone(), |view, (dimension, (start, length))| {
        view.narrow(dimension, *start..start + length).unwrap()
    });
    part.permute(order).unwrap()
}

/// Places of a view's elements, in row-major order.
fn places_of(view: &Tensor) -> Vec<usize> {
    let shape = view.shape();
    (0..view.len())
        .map(|number| {
            let mut rest = number;
            let mut indices = vec![0; shape.len()];
            for dimension in (0..shape.len()).rev() {
                indices[dimension] = rest % shape[dimension];
                rest /= shape[dimension];
            }
            view.layout().place(&indices).unwrap()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Writes from any place, on any stream, have the same effect as on a list.
    #[test]
    fn programs_of_writes_change_only_the_named_elements(
        writes in prop::collection::vec(write(), 0..12), seed in 0u64..1000,
    ) {
        let stands = [stand_with(SimConfig::default().seed(seed)), stand_with(SimConfig::default().seed(seed).ordinal(1))];
        let streams = [(); 3].map(|()| stands[0].device.stream().unwrap());
        let block = numbered(&stands[0], &SHAPE);
        let mut model = floats(&block);
        for Write { lengths, starts, order, what, stream } in writes {
            let stream = &streams[stream];
            let mut to = seen(&block, &starts, &lengths, &order);
            let places = places_of(&to);
            let from = match what {
                What::Fill(value) => {
                    to.fill(value, stream).unwrap();
                    places.into_iter().for_each(|place| model[place] = value);
                    continue;
                }
                What::Own(starts) => seen(&block, &starts, &lengths, &order),
                What::One(starts) => {
                    let one = seen(&block, &starts, &[1; 6], &order);
                    one.broadcast(to.shape()).unwrap()
                }
                What::Numbers(first, place) => {
                    let place = match place {
                        0 => Place::Host,
                        1 => Place::from(stands[0].transfer.pinned()),
                        place => Place::from(&stands[usize::from(place) - 2].transfer),
                    };
                    let numbers = (0..places.len()).map(|n| n as f32 + f32::from(first)).collect();
                    Tensor::from_vec(numbers, to.shape()).unwrap().to(&place).unwrap().wait().unwrap()
                }
            };
            let values: Vec<f32> = if from.shares_memory_with(&block) {
                places_of(&from).into_iter().map(|place| model[place]).collect()
            } else {
                floats(&from)
            };
            let begun = to.copy_from(&from, stream).unwrap();
            if seed % 2 == 0 {
                begun.wait().unwrap();
            }
            places.into_iter().zip(values).for_each(|(place, value)| model[place] = value);
        }
        prop_assert_eq!(floats(&block), model);
        for stand in &stands {
            stand.quiet();
        }
    }
}

"""Calls a server by tritonclient, in a process of its own: gevent changes our sockets."""

import json
import sys

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException


def main() -> None:
    address, protocol, path = sys.argv[1:]
    triton = triton_http if protocol.startswith("http") else triton_grpc
    with open(path) as file:
        request = json.load(file)
    client = triton.InferenceServerClient(address)
    inputs = []
    for each in request["inputs"]:
        shape = each["shape"]
        if request["column"] and not each["name"].endswith(("lengths", "tags", "seen")):
            shape = [*shape, 1]
        made = triton.InferInput(each["name"], shape, each["datatype"])
        dtype = {"INT64": np.int64, "FP64": np.float64, "BYTES": np.object_}[each["datatype"]]
        values = np.array(each["data"], dtype).reshape(shape)
        if protocol == "http-json":
            made.set_data_from_numpy(values, binary_data=False)
        else:
            made.set_data_from_numpy(values)
        inputs.append(made)
    outputs = [triton.InferRequestedOutput(name) for name in request["outputs"]] or None
    metadata = client.get_model_metadata(
        "model", **({} if "http" in protocol else {"as_json": True})
    )
    result = client.infer(
        "model", inputs, outputs=outputs, request_id="a", parameters=request["parameters"]
    )
    answer = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready() and client.is_model_ready("model"),
        "server": bool(client.get_server_metadata()),
        "inputs": [each["name"] for each in metadata["inputs"]],
        "prediction": result.as_numpy("prediction").tolist(),
        "before": None,
    }
    if "prediction_before" in request["outputs"]:
        answer["before"] = result.as_numpy("prediction_before").tolist()
    try:
        client.infer("model", inputs[:1])
    except InferenceServerException as error:
        answer["error"] = str(error)
    print(json.dumps(answer))


main()

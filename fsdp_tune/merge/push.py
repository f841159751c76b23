"""Uploads a merged model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.errors import Where, failed_error, usage_error


def push_to_hub(folder: Path, repository: str) -> str:
    """The address of the commit. A repository that does not exist is made, private; one that exists keeps its visibility.

    The token is the one of `hf auth login` or HF_TOKEN. FailedError leaves the local directory as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(library_name="fsdp-tune")
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload merged model")
    except HFValidationError as error:
        raise usage_error("merge-push-name", f"`{repository}` is no name of a repository", hint="write `OWNER/NAME`") from error
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise failed_error(
            "merge-push",
            f"the model could not be pushed to `{repository}` ({type(error).__name__}); it is whole on this machine",
            where=Where(str(folder)),
            hint=f"check the network and `hf auth login`, then: hf upload {repository} {folder}",
        ) from error
    return str(commit.commit_url)
